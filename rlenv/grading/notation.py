"""The vocabulary of answers: what each command, character and word of LaTeX and plain notation stands for.

Tables only. A value `(kind, text)` is the token that `rlenv.grading.lexer` makes of the key.
"""

from __future__ import annotations

from typing import Literal

Kind = Literal[
    "num", "sym", "func", "cmd", "word", "and", "op", "open", "close", "rel", "sep", "const", "set", "env", "uncovered"
]


def words(text: str) -> frozenset[str]:
    """The words of a table's row."""
    return frozenset(text.split())


FUNCTIONS = words("sin cos tan cot sec csc arcsin arccos arctan asin acos atan sinh cosh tanh ln log exp sqrt abs")
GREEK = words(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau "
    "upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell hbar angle triangle"
)
PERCENT = words("percent percentage pct percents")
DEGREE = words("degree degrees deg")
INFINITY = words("infinity inf oo infty")
UNCOVERED = words("int iint iiint oint lim limsup liminf gcd lcm max min det bmod pmod mod partial nabla sup inf arg")
UPRIGHT = words(
    "text textbf textit textrm textnormal textsf texttt mbox hbox mathrm mathbf mathit mathsf mathtt boldsymbol bm "
    "operatorname"
)
ACCENTS = words("mathbb mathcal mathfrak vec hat tilde")

# fmt: off
COMMANDS: dict[str, tuple[Kind, str]] = {
    "cdot": ("op", "*"), "times": ("op", "*"), "ast": ("op", "*"), "div": ("op", "/"), "over": ("op", "over"),
    "choose": ("op", "choose"), "pm": ("op", "pm"), "mp": ("op", "mp"), "circ": ("op", "deg"), "degree": ("op", "deg"),
    "prime": ("op", "'"),
    "%": ("op", "%"), "$": ("op", "money"), "lvert": ("op", "|"), "rvert": ("op", "|"), "vert": ("op", "|"),
    "mid": ("op", "|"), "lt": ("rel", "<"), "gt": ("rel", ">"), "le": ("rel", "<="), "leq": ("rel", "<="),
    "leqslant": ("rel", "<="), "ge": ("rel", ">="), "geq": ("rel", ">="), "geqslant": ("rel", ">="),
    "ne": ("rel", "!="), "neq": ("rel", "!="), "approx": ("rel", "~"), "sim": ("rel", "~"), "equiv": ("rel", "="),
    "in": ("rel", "in"), "colon": ("rel", ":"), "to": ("rel", "->"), "rightarrow": ("rel", "->"),
    "cup": ("set", "cup"), "cap": ("set", "cap"), "setminus": ("set", "minus"), "backslash": ("set", "minus"),
    "emptyset": ("const", "empty"), "varnothing": ("const", "empty"), "infty": ("const", "inf"), "pi": ("const", "pi"),
    "{": ("open", "set{"), "}": ("close", "set}"), "lbrace": ("open", "set{"), "rbrace": ("close", "set}"),
    "langle": ("open", "("), "rangle": ("close", ")"), "lfloor": ("open", "floor"), "rfloor": ("close", "floor"),
    "lceil": ("open", "ceil"), "rceil": ("close", "ceil"), "frac": ("cmd", "frac"), "dfrac": ("cmd", "frac"),
    "tfrac": ("cmd", "frac"), "cfrac": ("cmd", "frac"), "binom": ("cmd", "binom"), "dbinom": ("cmd", "binom"),
    "tbinom": ("cmd", "binom"), "sum": ("cmd", "sum"), "prod": ("cmd", "prod"), "overline": ("cmd", "overline"),
    "bar": ("cmd", "overline"), "ldots": ("sym", "..."), "dots": ("sym", "..."), "cdots": ("sym", "..."),
    "imath": ("sym", "i"), "land": ("and", "and"), "wedge": ("and", "and"), "lor": ("and", "or"), "vee": ("and", "or"),
}
CHARACTERS: dict[str, tuple[Kind, str]] = {
    "+": ("op", "+"), "-": ("op", "-"), "*": ("op", "*"), "/": ("op", "/"), "^": ("op", "^"), "_": ("op", "_"),
    "!": ("op", "!"), "'": ("op", "'"), "|": ("op", "|"), "%": ("op", "%"), "{": ("open", "{"), "}": ("close", "}"),
    "(": ("open", "("), ")": ("close", ")"), "[": ("open", "["), "]": ("close", "]"), "<": ("rel", "<"),
    ">": ("rel", ">"), "=": ("rel", "="), ":": ("rel", ":"), ",": ("sep", ","), ";": ("sep", ","), "&": ("env", "&"),
}
DIGRAPHS: dict[str, tuple[Kind, str]] = {
    "<=": ("rel", "<="), ">=": ("rel", ">="), "!=": ("rel", "!="), "==": ("rel", "="), "**": ("op", "^"),
    "+-": ("op", "pm"), "~=": ("rel", "~"), "\\\\": ("env", "row"),
}
UNICODE = str.maketrans({
    "−": "-", "–": "-", "—": "-", "×": "*", "·": "*", "⋅": "*", "÷": "/", "∕": "/", "⁄": "/", "≤": r"\le ",
    "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∞": r"\infty ", "π": r"\pi ", "±": r"\pm ", "∓": r"\mp ",
    "°": r"\degree ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "√": r"\sqrt ", "₀": "_0",
    "₁": "_1", "₂": "_2", "₃": "_3", "²": "^2", "³": "^3", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda ", "μ": r"\mu ",
    "φ": r"\phi ", "ω": r"\omega ", "σ": r"\sigma ", "ℝ": r"\mathbb{R}", "’": "'", "：": ":", "，": ",", "（": "(",
    "）": ")", "€": r"\$", "£": r"\$", "∖": r"\setminus ", "…": r"\ldots ", "％": "%", "\u00a0": " ",
    "\u2009": " ", "\u202f": " ", **dict.fromkeys("\u200b\u200c\u200d\u200e\u200f\u2060\u2061\u2062\ufeff", ""),
})
# fmt: on

"""Hides passwords, tokens and keys in a command line or a line of source, before it is stored, sent or shown.

The value of an option is hidden if the name indicates a secret: `--api-key X`, `--hf_token=X`, `WANDB_API_KEY=X`,
`+auth.token=X`, also inside a longer argument (`--export=ALL,WANDB_API_KEY=X`, `{"api_key": "X"}`,
`https://host/?token=X`). User and password in a URL are hidden too. Names are split into words first, so that
`--tokenizer gpt2`, `--max_tokens 512` and `--num-key-value-heads 8` stay readable.

In a line of source only what is written there can be a secret, not what it computes: `token = "X"` is hidden, `key =
self.key(x)` is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise

MASK = "***"
ARGUMENT_CHARS_MAX = 16_384  # a longer argument is cut before it is searched

_ALWAYS = {"secret", "password", "passwd", "passphrase", "passcode", "pwd", "apikey", "credential"}
_ALWAYS_ENDS = ("secret", "password", "passwd", "apikey", "secretkey", "accesskey", "privatekey")
"""Endings of a word: `clientsecret`, `wandbapikey`."""
_ORDINARY_TOKEN = {
    "pad", "eos", "bos", "unk", "cls", "sep", "mask", "sos", "special", "start", "end", "stop", "begin",
    "image", "audio", "video", "speech", "text", "prompt", "prefix", "class", "per", "every", "each", "next", "first",
    "last", "new", "detoken", "sub", "by",
}  # fmt: skip
"""Before `token`: it is a tokenizer's token."""
_ORDINARY_KEY = {
    "sort", "group", "input", "output", "label", "labels", "target", "text", "image", "audio", "video", "metric",
    "monitor", "loss", "feature", "column", "field", "prompt", "caption", "query", "question", "answer", "response",
    "dict", "json", "state", "by", "num", "n",
}  # fmt: skip
"""Before `key`: it names a column or an entry."""
_HARMLESS = re.compile(
    r"[-+]?\d{0,5}(\.\d{0,5})?(e-?\d+)?|true|false|yes|no|on|off|none|null|auto|<[|\w/ -]{1,32}>|\[[A-Z_\d]{1,20}\]",
    re.I,
)
"""Values that are no secret: a small number, a switch, a tokenizer's token such as <pad>."""

_ANIMALS = {"monkey", "turkey", "donkey", "hotkey", "hockey"}

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_ASSIGNED = re.compile(r"([-+~]*[^\W\d][\w.\-/:@]*)=(.*)", re.S)
_NAMED = re.compile(r"""(?<![\w.\-])([^\W\d][\w.\-]*)(["']?\s*[=:](?!//)\s*)""")  # inside an argument
_VALUE = re.compile(r"""(["'])((?!\1).)*\1?|[^\s"',;&}\]]+""", re.S)
_NAME = re.compile(r"[^\W\d]\w*")
_CODE = re.compile(
    r"""(?P<comment>\#.*)|(?P<quote>\"{3}|'{3}|["'])(?P<body>(?:\\.|(?!(?P=quote)).)*)(?P<end>(?P=quote))?"""
    r"""|(?P<name>[^\W\d]\w*)"""
    r"""|(?P<number>\d[\w.]*)|.""",
    re.S,
)
_AUTHORITY = re.compile(r"[^\s/?#]*")
_ODD_PASSWORD = re.compile(r"[^\s/?#:@]*:(?!\d{1,5}(?:[/?#,]|$))\S*@")  # contains / ? or #; not followed by a port
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[^\s\"']+", re.I)
_SIGNED = {"sig", "signature"}  # in a URL's query: a storage signature grants access


def masked(argv: Iterable[str]) -> Iterator[str]:
    """The arguments in order, each secret replaced by `***`. Idempotent."""
    name = ""
    for argument in argv:
        argument = argument[:ARGUMENT_CHARS_MAX]
        if name and not argument.startswith("-"):
            yield MASK if _hides(name, argument) else _inside(argument)
            if not name.endswith("s"):  # --api-keys takes several
                name = ""
            continue
        name = ""
        assigned = _ASSIGNED.fullmatch(argument)
        if assigned is not None and _hides(assigned[1], assigned[2]):
            yield f"{_inside(assigned[1])}={MASK}"
            continue
        if assigned is None and argument.startswith("-") and is_secret(argument):
            name = argument
        yield _inside(argument)


def masked_code(line: str) -> str:
    """A line of Python: the texts behind the name of a secret are replaced by `***`, and passwords of digits, and a
    comment that names a secret.

    Other texts and comments are searched like a command: URLs, `Bearer X`, `--api-key=X`.
    """
    out, secret, before = "", False, ""
    for part in _CODE.finditer(line[:ARGUMENT_CHARS_MAX]):
        text = part[0]
        if part["quote"]:
            quote = part["quote"]
            if secret:
                text = quote + MASK + quote
            else:
                secret = any(map(is_secret, _NAME.findall(text)))
                text = quote + _as_a_command(part["body"]) + (part["end"] or "")
        elif part["name"]:
            secret = secret or is_secret(text)
            before = text
        elif part["number"]:
            text = MASK if secret and _hides(before, text) else text
        elif part["comment"] and any(map(is_secret, _NAME.findall(text))):
            text = f"# {MASK}"
        elif part["comment"]:
            text = _as_a_command(text)
        out += text
    return out


def _as_a_command(text: str) -> str:
    return " ".join(masked(_inside(text).split(" ")))


def is_secret(name: str) -> bool:
    """Whether an option or variable of this name holds a secret."""
    words = [word.lower() for word in _WORD.findall(name)]
    singular = [word if word.endswith("ss") else word.removesuffix("s") for word in words]
    if any(word in _ALWAYS or word.endswith(_ALWAYS_ENDS) for word in singular):
        return True
    pairs = set(pairwise(singular))
    if pairs & {("api", "key"), ("access", "key"), ("secret", "key"), ("private", "key")}:
        return words[-1] not in ("file", "path", "dir", "name")
    last, before = words[-1] if words else "", words[-2] if len(words) > 1 else ""
    if last.endswith("token"):
        return before not in _ORDINARY_TOKEN
    return last.endswith("key") and last not in _ANIMALS and before not in _ORDINARY_KEY


def _hides(name: str, value: str) -> bool:
    """A password may be a short number; a token or key is not."""
    if not value or not is_secret(name):
        return False
    lower = name.lower()
    return any(word in lower for word in ("pass", "pwd", "secret")) or _HARMLESS.fullmatch(value) is None


def _inside(argument: str) -> str:
    """An argument with the secrets inside it hidden."""
    first, *rest = argument.split("://")
    argument = "://".join((first, *map(_without_user, rest)))
    argument = _BEARER.sub(rf"\1 {MASK}", argument)
    braces = "{" in argument
    out, at = "", 0
    while named := _NAMED.search(argument, at):
        out, at = out + argument[at : named.end()], named.end()
        signed = argument[named.start() - 1] in "?&" and named[1].lower().rpartition("-")[2] in _SIGNED
        if (":" in named[2] and not braces) or not (signed or is_secret(named[1])):
            continue
        value = _VALUE.match(argument, at)
        quote = "" if value is None else value[1] or ""
        if value is not None and (signed or _hides(named[1], value[0].strip(quote or None))):
            out, at = out + quote + MASK + quote, value.end()
    return out + argument[at:]


def _without_user(text: str) -> str:
    """`text`: what follows `://` in a URL."""
    authority = _AUTHORITY.match(text)
    end = authority[0].rfind("@") if authority is not None else -1
    if end < 0 and (odd := _ODD_PASSWORD.match(text)) is not None:
        end = odd.end() - 1
    return text if end < 0 else MASK + text[end:]

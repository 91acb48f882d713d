"""The demonstration language's tokenizer: whole words over a byte-level fallback.

The vocabulary has exactly :data:`VOCAB_SIZE` entries, in this order: two special tokens, the 256
byte-level characters, every language word with its leading space, the bare words that begin
lines, digits and punctuation with a leading space, and reserved special tokens as padding. Bare
digits, bare punctuation and the line feed are byte-level characters, hence single tokens too.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCAB_SIZE = 640
END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
END_OF_TEXT_ID = 0
PAD_ID = 1
PUNCTUATION = ".,;:=?!->()/+*#|"
SPLIT_PATTERN = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]|\s"


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Record keys. A two-word key takes its first word from the first half, its second from the other.
KEYS = _words(
    "amber jade opal ruby pearl topaz onyx agate garnet quartz coral ivory copper silver gold"
    " iron tin zinc cobalt nickel crimson scarlet indigo violet azure teal olive maroon beige"
    " khaki lilac mauve"
    " oak elm ash birch cedar maple willow aspen pine fir yew hazel alder beech larch holly"
    " rose lily iris tulip daisy poppy orchid lotus fern moss ivy reed clover thistle heather"
    " jasmine"
)
# Record values, never used as keys nor in prose.
VALUES = _words(
    "lion tiger zebra camel otter panda koala lemur moose bison hyena jackal gecko cobra viper"
    " falcon heron stork crane robin finch raven parrot penguin salmon trout shark whale dolphin"
    " squid crab lobster"
    " pear apple plum peach cherry grape lemon lime mango melon fig date kiwi guava papaya"
    " banana carrot onion garlic potato tomato pepper radish turnip spinach celery cabbage"
    " pumpkin walnut almond cashew peanut"
)
NOUNS = _words(
    "fox dog cat wolf bear horse goat sheep mouse owl king queen farmer baker miller sailor"
    " painter doctor teacher child ball lamp book drum"
)
ADJECTIVES = _words(
    "old young red blue green tall small big quick slow happy sad brave quiet loud kind"
)
VERBS = _words("sees likes finds follows helps calls hears meets watches carries paints guards")
PLACES = _words("river forest hill bridge market tower garden harbor mill castle field road")
FUNCTION_WORDS = _words("the a near in and goes to")
HOSTS = _words("alpha beta gamma delta epsilon zeta theta kappa lambda sigma tau omega")
SERVICES = _words("disk net cache auth mail queue index proxy")
EVENTS = _words("read write open close start stop flush sync retry send load scan merge commit")
LEVELS = _words("info debug warn error")
METRICS = _words("size rate temp count")
STATUSES = _words("ok low high idle busy ready done wait")
LOG_WORDS = _words("t alert code")
RECORD_WORDS = _words("key")

#: Every language word, once; each is a single token when a space precedes it.
WORDS: tuple[str, ...] = (
    *KEYS,
    *VALUES,
    *NOUNS,
    *ADJECTIVES,
    *VERBS,
    *PLACES,
    *FUNCTION_WORDS,
    *HOSTS,
    *SERVICES,
    *EVENTS,
    *LEVELS,
    *METRICS,
    *STATUSES,
    *LOG_WORDS,
    *RECORD_WORDS,
)
#: The words that may begin a line; each is a single token without a space as well.
LINE_WORDS: tuple[str, ...] = ("the", "in", "key", "alert", *HOSTS)


def _byte_characters() -> list[str]:
    """The printable stand-in of each byte value, as byte-level tokenizers spell it."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters = []
    shifted = 0x100
    for value in range(256):
        if value in printable:
            characters.append(chr(value))
        else:
            characters.append(chr(shifted))
            shifted += 1
    return characters


@functools.lru_cache(maxsize=1)
def _pieces() -> tuple[str, ...]:
    characters = _byte_characters()
    space = characters[0x20]
    pieces = [END_OF_TEXT, PAD, *characters]
    pieces += [space + word for word in WORDS]
    pieces += LINE_WORDS
    pieces += [space + digit for digit in "0123456789"]
    pieces += [space + mark for mark in PUNCTUATION]
    missing = VOCAB_SIZE - len(pieces)
    if missing < 0 or len(set(pieces)) != len(pieces):
        raise ValueError("the language's words do not fit the vocabulary or repeat")
    pieces += [f"<|reserved_{k}|>" for k in range(missing)]
    return tuple(pieces)


def vocabulary() -> dict[str, int]:
    """Return the vocabulary: byte-level spelling of each token to its id."""
    return {piece: index for index, piece in enumerate(_pieces())}


def surface(token_id: int) -> str:
    """Return the text of one token; bytes outside ASCII have none of their own.

    Raises:
        ValueError: the token is a single byte that is not a character by itself.
    """
    piece = _pieces()[token_id]
    if piece.startswith("<|") and piece.endswith("|>"):
        return piece
    values = {character: value for value, character in enumerate(_byte_characters())}
    raw = bytes(values[character] for character in piece)
    if not raw.isascii():
        raise ValueError(f"token {token_id} is a lone byte outside ASCII")
    return raw.decode("ascii")


def build_tokenizer() -> Tokenizer:
    """Build the tokenizer; every call gives the same one."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary(), merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(piece, special=True, normalized=False)
            for piece in _pieces()
            if piece.startswith("<|") and piece.endswith("|>")
        ]
    )
    return tokenizer

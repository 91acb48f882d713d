"""The English lexicon's words; no word is in two lists."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words(
    "amber ancient awkward bitter blunt brisk bronze bumpy calm careful chilly clever clumsy"
    " coarse copper crimson curious curly dapper dim dusty eager early faint fancy fierce frosty"
    " gentle glossy golden grim hollow humble icy ivory jolly keen lively lone loyal mellow misty"
    " modest narrow noble odd pale patient plain polite proud quaint rapid rusty scarlet shy"
    " silver sleepy solemn spare steady stiff tame tidy"
)
NOUNS = _words(
    "acorn anchor anvil apron badge banjo barrel basket beacon blanket bonnet bottle bucket"
    " button cabin candle canoe carpet chisel cobweb compass cradle curtain dagger dresser easel"
    " feather fiddle flute funnel garland goblet hammer harness helmet hinge kettle ladder"
    " lantern locket magnet marble mirror mitten needle oven paddle parcel pebble pencil pillow"
    " pulley quilt ribbon saddle satchel shovel spindle teapot thimble trumpet umbrella violin"
    " whistle"
)
PEOPLE = _words(
    "baker carpenter clerk cook dancer farmer fisher gardener guard hunter judge mason miller"
    " nurse painter pilot plumber poet porter potter sailor scholar shepherd singer smith tailor"
    " teacher weaver"
)
VERBS = _words(
    "admires borrows brings buys carries cleans counts describes draws drops finds follows"
    " forgets hides inspects leaves lends lifts measures mends notices packs praises repairs"
    " returns sells studies washes"
)
PLACES = _words(
    "abbey alley arcade attic bakery bridge brook canal castle cellar chapel cliff cottage"
    " courtyard ferry field fountain harbour hill library market meadow mill orchard pier quarry"
    " stable station tower village"
)
TIMES = _words("morning noon evening night spring summer autumn winter Monday Friday")
#: Words of one token in nearly every vocabulary.
SHORT = _words("the and of to in it is was on at by as we he so or no up my go")
REPEATED = (
    "The road goes over the hill and down to the river.",
    "On the far side there is a mill with a green door.",
    "Nobody has seen the miller since the first days of spring.",
    "The water is low, and the wheel stands still.",
    "In the evening the road is quiet again.",
)
ONSETS = _words("b br d dr f fl g gl h j k kl l m n p pl r s sk sl t tr v z")
VOWELS = _words("a e i o u ai ou")
CODAS = ("", "l", "m", "n", "r", "s", "k", "nd")

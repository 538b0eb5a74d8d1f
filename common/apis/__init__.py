"""The APIs that are relayed: which one a request speaks, what routing needs out of it, how its errors look.

`routes` says what is relayed, `bodies` reads the few fields that routing needs, `hints` the
headers by which a client says more, `errors` has the shape of each API's
errors. Adding a route is one line in `routes`.
"""

from common.apis.bodies import Ask, FirstId, held_key, prose, renamed, understand
from common.apis.continuation import Continuation
from common.apis.errors import error_body, error_event
from common.apis.hints import HINTS, Hints, read_hints
from common.apis.hints import NOTHING as NO_HINTS
from common.apis.routes import HEALTH, Api, Family, Kind, Match, family_of, match

__all__ = [
    "HEALTH",
    "HINTS",
    "NO_HINTS",
    "Api",
    "Ask",
    "Continuation",
    "Family",
    "FirstId",
    "Hints",
    "Kind",
    "Match",
    "error_body",
    "error_event",
    "family_of",
    "held_key",
    "match",
    "prose",
    "read_hints",
    "renamed",
    "understand",
]

"""Who exists: this process's own presence in the store, and everybody's as pools that the stages choose from.

`records` says what is stored and where, `outage` which removals to doubt after an outage, `pools` how records add up to
the tree; all three are pure. `membership` joins them to a store.
"""

from common.membership.membership import Membership, OnChange, Source
from common.membership.outage import OutageGuard
from common.membership.pools import Tree

__all__ = ["Membership", "OnChange", "OutageGuard", "Source", "Tree"]

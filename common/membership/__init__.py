"""Who exists: this process's own presence in the store, and everybody's as pools that the stages choose from.

`records` says what is stored and where, `drains` what operators keep work from, `outage` which removals to doubt after
an outage, `orphans` what to keep though its agent is gone, `pools` how records add up to the tree; all of them are
pure. `membership` joins them to a store.
"""

from common.membership.drains import Drain
from common.membership.membership import Membership, OnChange, Source
from common.membership.outage import OutageGuard
from common.membership.pools import Tree

__all__ = ["Drain", "Membership", "OnChange", "OutageGuard", "Source", "Tree"]

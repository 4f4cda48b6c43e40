"""Secure summation: a server learns the sum of its clients' vectors, and no single vector.

Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017
(https://doi.org/10.1145/3133956.3133982), the variant against an active server. `Member` is one client in one
sum, `Coordinator` the server, `FixedPoint` makes numbers of tensors. By round of the paper (figure 4):

| round | client | server |
|---|---|---|
| 0 AdvertiseKeys | `advertise` | `add_advert`, `adverts` |
| 1 ShareKeys | `share` | `add_shares`, `shares_for` |
| 2 MaskedInputCollection | `mask`, `confirm_members` | `begin`, `add_masked`, `survivors` |
| 3 ConsistencyCheck, if a member was lost | `confirm` | `add_confirmation`, `confirmations` |
| 4 Unmasking | `unmask` | `add_unmasked`, `total` |

Differs: seeds of self masks and all shares are committed to, so that whoever lies is named; keys are bound to
the list of members and to what the caller binds (weights); members sign the list of all of them beside round
2, which makes round 3 superfluous where nobody is lost. Why:
docs/decisions/0016-sums-that-hide-updates.md
"""

from wardround.privacy.secure_sum.coordinator import Coordinator
from wardround.privacy.secure_sum.fixed_point import FixedPoint
from wardround.privacy.secure_sum.identity import Identity, LocalIdentity
from wardround.privacy.secure_sum.member import Member
from wardround.privacy.secure_sum.refusals import SumRefusal, TooFewMembers

__all__ = [
    "Coordinator",
    "FixedPoint",
    "Identity",
    "LocalIdentity",
    "Member",
    "SumRefusal",
    "TooFewMembers",
]

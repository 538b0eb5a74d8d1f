"""What the demo consists of: three regions, six clusters, eighteen simulated servers on unlike GPUs.

Prices are public on-demand prices of a GPU hour, rounded, with a factor a region; round trips are those between public
clouds' regions of these names, rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

MODEL = "llama-8b"
PRICE_USD_PER_HOUR = {"h100": 4.0, "a100": 2.0, "l4": 0.8, "t4": 0.5}


@dataclass(frozen=True, slots=True)
class Cluster:
    """Servers under one instance tier; `gpus` has one entry a server."""

    name: str
    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """A region; its price of a GPU hour is the list price times `price_factor`."""

    name: str
    price_factor: float
    clusters: tuple[Cluster, ...]


REGIONS = (
    Region(
        "us-east",
        1.0,
        (Cluster("us-east-a", ("h100", "h100", "a100")), Cluster("us-east-b", ("a100", "l4", "l4"))),
    ),
    Region(
        "eu-west",
        1.3,
        (Cluster("eu-west-a", ("h100", "a100", "a100")), Cluster("eu-west-b", ("a100", "l4", "t4"))),
    ),
    Region(
        "ap-south",
        0.7,
        (Cluster("ap-south-a", ("a100", "a100", "l4")), Cluster("ap-south-b", ("l4", "l4", "t4"))),
    ),
)
RTT_S = {
    "us-east": {"us-east": 0.0, "eu-west": 0.080, "ap-south": 0.190},
    "eu-west": {"us-east": 0.080, "eu-west": 0.0, "ap-south": 0.120},
    "ap-south": {"us-east": 0.190, "eu-west": 0.120, "ap-south": 0.0},
}
SPEED = 0.5  # of the simulated servers, times life: at twelve requests a second they have something to share out
KILLED_REGION = "eu-west"  # whose balancers are killed under load
KILLED_INSTANCE = ("us-east", "us-east-a", "us-east-a-1-h100")


def instance_name(cluster: Cluster, index: int) -> str:
    """Name of the `index`-th server of a cluster, as in us-east-a-0-h100."""
    return f"{cluster.name}-{index}-{cluster.gpus[index]}"

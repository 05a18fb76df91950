"""What strategies send between four hosts, read at their interfaces, beside the arithmetic of what they should."""

import pytest

from raytrain.bench.comm_hosts import HostRanks, Layout
from raytrain.bench.hosts import cluster_of, why_not

reason = why_not()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))

# gradients are what they are in size, whatever the images
RECIPE = ("model.name=resnet18", "data.image_size=32", "train.micro_batch_size=2", "train.precision=fp32")
STEPS = 3


def wire_bytes(folder, layout, *names):
    """Bytes that a host sends in a step, by strategy, mean over hosts; the first is that of plain DDP."""
    with cluster_of(layout.hosts, folder / "hosts") as hosts:
        ranks = HostRanks(hosts, layout, folder, RECIPE)
        turns = {name: ranks.turn(name, None, STEPS) for name in ("ddp", *names)}
    for name, turn in turns.items():
        print(
            f"{name}: {turn.wire_bytes / 1e6:.2f} MB a host and step, by arithmetic {turn.sent_bytes / 1e6:.2f} a rank"
        )
    return [turn.wire_bytes for turn in turns.values()], [turn.sent_bytes for turn in turns.values()]


def test_compression_sends_less(tmp_path):
    """A ring of four sends 2 * 3 / 4 of the gradients: of 16 bits half as much, of signs 1/32."""
    (ddp, fp16, onebit), arithmetic = wire_bytes(tmp_path, Layout(4, 1, "node"), "fp16", "onebit")
    assert 0.48 < fp16 / ddp <= 0.52
    assert 0.03 < onebit / ddp <= 0.06
    for measured, computed in zip((ddp, fp16), arithmetic, strict=False):
        assert measured == pytest.approx(computed, rel=0.06)  # headers, and the small sums beside


@pytest.mark.parametrize(
    ("deal", "bound", "arithmetic"),
    [
        ("node", 0.90, 1.5 / 1.75),  # a ring in node order leaves each host once: 2 * 7 / 8 against 2 * 3 / 4
        ("round", 0.47, 1.5 / 3.5),  # dealt round, each of a host's two ranks has its next one on another host
    ],
)
def test_a_hierarchical_sum_leaves_each_host_once(tmp_path, deal, bound, arithmetic):
    (ddp, hierarchical), _ = wire_bytes(tmp_path, Layout(4, 2, deal), "hierarchical")
    assert arithmetic - 0.04 < hierarchical / ddp <= bound

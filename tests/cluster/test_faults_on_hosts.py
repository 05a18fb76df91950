"""A short run of `faults`: some of each party's faults, and everything checked that a long one checks."""

import pytest

from raytrain.bench.hosts import why_not
from tests.cluster import checks
from tests.cluster.faults import campaign
from tests.cluster.lab import lab_in

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

FAULTS = ("stop-mlflow", "kill-worker", "power-off", "kill-driver", "add-host")


def test_a_run_outlives_the_loss_of_each_of_its_parts(tmp_path):
    rows = []
    with lab_in(tmp_path / "lab", steps=110) as lab:
        campaign(lab, FAULTS, rows, settle=(0.5, 2))
        verdicts = checks.verdicts(lab)
    assert [f"{what}: {fault}" for what, faults in verdicts.items() for fault in faults] == []
    assert verdicts.keys() >= {"the driver", "nothing is left", "samples", "metrics", "weights"}
    assert [row["kind"] for row in rows] == list(FAULTS)
    assert all(row["next_seconds"] < 120 for row in rows), rows

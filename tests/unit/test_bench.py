"""Benchmarks: the arithmetic of a report, the photographs, and a small run of the loader's."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from raytrain.bench.__main__ import main
from raytrain.bench.photographs import write_photographs
from raytrain.bench.report import Report
from raytrain.errors import DataError

ROOT = Path(__file__).parents[2]
SIDES = ("reference_float32", "reference_uint8", "folder", "arrow", "arrow400", "raw")
RATIOS = (
    "folder_vs_reference_float32",
    "folder_vs_reference_uint8",
    "arrow_vs_reference_float32",
    "arrow400_vs_reference_float32",
    "raw_vs_reference_float32",
)


def write_and_read(report, path):
    report.write_json(str(path))
    return json.loads(path.read_text())


def size_of(file):
    with Image.open(file) as image:
        return image.size


def test_a_ratio_is_taken_in_each_round_before_the_median(tmp_path):
    rows = {"ours": [10.0, 30.0, 20.0], "theirs": [5.0, 10.0, 20.0]}
    report = Report("step", "images/s", rows, {"ours_vs_theirs": ("ours", "theirs")})
    content = write_and_read(report, tmp_path / "report.json")
    assert content["bench"] == "step"
    assert content["rows"] == [
        {"name": "ours", "unit": "images/s", "median": 20.0, "min": 10.0, "max": 30.0},
        {"name": "theirs", "unit": "images/s", "median": 10.0, "min": 5.0, "max": 20.0},
    ]
    assert content["ratios"] == {"ours_vs_theirs": {"median": 2.0, "min": 1.0, "max": 3.0}}


def test_the_table_of_one_unit_has_a_line_for_each_row():
    report = Report(
        "step", "images/s", {"a": [1.0, 2.0, 9.0], "b": [4.0, 4.0, 4.0]}, {"a_vs_b": ("a", "b")}, ("Note.",)
    )
    lines = report.table().splitlines()
    assert lines[:7] == [
        "| images/s | median | min | max |",
        "|---|---|---|---|",
        "| a | 2.0 | 1.0 | 9.0 |",
        "| b | 4.0 | 4.0 | 4.0 |",
        "",
        "| ratio, 3 rounds | median | min | max |",
        "|---|---|---|---|",
    ]
    assert lines[7] == "| a_vs_b | 0.500 | 0.250 | 2.250 |"
    assert "torch " in lines[9]
    assert lines[10:] == ["Note."]


def test_the_table_of_several_units_has_a_column_for_each(tmp_path):
    units = {"a": "CPU-ms", "a_speed": "images/s", "b": "CPU-ms", "b_speed": "images/s"}
    rows = {"a": [1.0, 2.0, 3.0], "a_speed": [900.0, 1000.0, 1100.0], "b": [4.0, 4.0, 4.0], "b_speed": [250.0] * 3}
    lines = {"a": ("a", "a_speed"), "b": ("b", "b_speed")}
    report = Report("data", units, rows, {"a_vs_b": ("b", "a")}, tables=(lines,), libraries=("torch", "pillow"))
    assert report.table().splitlines()[:5] == [
        "| median (min - max) | CPU-ms | images/s |",
        "|---|---|---|",
        "| a | 2.00 (1.00 - 3.00) | 1000 (900 - 1100) |",
        "| b | 4.00 (4.00 - 4.00) | 250 (250 - 250) |",
        "",
    ]
    content = write_and_read(report, tmp_path / "report.json")
    assert [(row["name"], row["unit"]) for row in content["rows"]] == list(units.items())
    assert content["ratios"]["a_vs_b"]["median"] == 2.0  # half the cost is twice the images a CPU-second
    assert set(content["machine"]["versions"]) == {"python", "torch", "pillow"}


def test_photographs_are_the_same_every_time_and_like_imagenet(tmp_path):
    pytest.importorskip("skimage")
    first, second = tmp_path / "first", tmp_path / "second"
    write_photographs(first, 60)
    write_photographs(second, 20)
    for split in ("train", "val"):
        files = sorted((first / split).glob("*/*.jpg"))
        assert len(files) == 60
        assert {file.parent.name for file in files} == {f"class{label}" for label in range(10)}
        again = sorted((second / split).glob("*/*.jpg"))
        assert [file.read_bytes() for file in again] == [
            (first / file.relative_to(second)).read_bytes() for file in again
        ]
        sizes = np.array([size_of(file) for file in files])
        assert np.abs(sizes.mean(axis=0) - (466, 399)).max() < 25
        assert 0.1 < (sizes[:, 1] > sizes[:, 0]).mean() < 0.5
        assert abs(np.mean([file.stat().st_size for file in files]) - 105_000) < 8_000
        with Image.open(files[0]) as image:
            assert "progressive" not in image.info
            assert [layer[1:3] for layer in image.layer] == [(2, 2), (1, 1), (1, 1)]  # 4:2:0
    assert len({file.read_bytes() for file in first.glob("*/*/*.jpg")}) == 120


def test_photographs_refuse_a_folder_that_has_some(tmp_path):
    pytest.importorskip("skimage")
    write_photographs(tmp_path, 10)
    with pytest.raises(DataError, match="name a new folder"):
        write_photographs(tmp_path, 10)


def test_what_is_missing_is_one_message(tmp_path):
    code = (
        "import sys; sys.modules['skimage'] = None; from raytrain.bench.__main__ import main; sys.exit(main(['data']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("raytrain: the photographs come with scikit-image")
    assert "pip install scikit-image" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_data_benchmark_loads_neither_ray_nor_mlflow():
    code = "import sys, raytrain.bench.data; assert not {'ray', 'mlflow', 'skimage'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_data_benchmark_measures_all_sides(tmp_path, capsys):
    pytest.importorskip("skimage")
    write_photographs(tmp_path / "images", 60)
    words = ["data", "--path", str(tmp_path / "images"), "--rounds", "1", "--images", "50", "--threads", "1"]
    assert main([*words, "--json", str(tmp_path / "out.json"), "--markdown", str(tmp_path / "out.md")]) == 0
    content = json.loads((tmp_path / "out.json").read_text())
    assert {row["name"]: row["unit"] for row in content["rows"]} == {
        f"{start}{side}{end}": f"{part} {unit}"
        for start, part in (("", "train"), ("eval_", "eval"))
        for side in SIDES
        for end, unit in (("", "CPU-ms"), ("_speed", "images/s"))
    }
    assert set(content["ratios"]) == {f"{start}{key}" for start in ("", "eval_") for key in RATIOS}
    assert all(row["min"] > 0 for row in [*content["rows"], *content["ratios"].values()])
    table = (tmp_path / "out.md").read_text()
    assert capsys.readouterr().out == table
    assert "50 training or 50 validation images" in table
    assert "simplejpeg" in table


def test_the_cost_of_a_checkpoint_is_measured_beside_a_synchronous_save(tmp_path):
    path = tmp_path / "report.json"
    assert main(["checkpoint", "--rounds", "1", "--saves", "1", "--spacing", "1", "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    assert [row["name"] for row in content["rows"]] == ["sync_save", "blocked", "added"]
    assert set(content["ratios"]) == {"blocked_vs_sync_save", "added_vs_sync_save"}
    assert all(row["median"] > 0 for row in content["rows"][:2])


@pytest.mark.filterwarnings("ignore")  # in MLflow itself
def test_an_outage_of_mlflow_is_measured_and_costs_no_metric(tmp_path, capsys):
    path = tmp_path / "report.json"
    assert main(["tracker", "--rounds", "1", "--steps", "3", "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    assert [row["name"] for row in content["rows"]] == ["up", "stopped", "hanging", "errors"]
    assert set(content["ratios"]) == {"stopped_vs_up", "hanging_vs_up", "errors_vs_up"}
    assert "was complete: up, stopped, hanging, errors." in capsys.readouterr().out

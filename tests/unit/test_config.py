import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from raytrain.commandline import (
    build,
    changed_recipe,
    dump,
    find_config,
    flatten,
    help_text,
    parse,
    read_yaml,
)
from raytrain.config import Config
from raytrain.errors import ConfigError
from raytrain.fit import FLAGS, main
from raytrain.plan import make_plan
from raytrain.schedule import make_schedule, peak_lr

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
FOLDER = {"data": {"source": "folder"}}


def fails(values, overrides=None):
    with pytest.raises(ConfigError) as caught:
        build(values, overrides or {}, "recipe.yaml")
    return str(caught.value)


def refused(*words):
    with pytest.raises(ConfigError) as caught:
        parse(words, "quickstart", FLAGS)
    return str(caught.value)


# what ships, and the way into a file and back


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_config_loads_by_name_and_by_path(name):
    by_name = parse([name], "quickstart", FLAGS)
    by_path = parse([str(ROOT / "configs" / f"{name}.yaml")], "quickstart", FLAGS)
    assert by_name.config == by_path.config
    assert by_name.config_name == by_path.config_name == name


def test_what_ships_are_the_quickstart_and_the_two_imagenet_recipes():
    assert {"quickstart", "resnet50_imagenet", "resnet50_4gpu"} <= set(SHIPPED)
    assert parse([], "quickstart", FLAGS).config_name == "quickstart"


@pytest.mark.parametrize("name", SHIPPED)
def test_a_dumped_shipped_config_reads_back_equal(name, tmp_path):
    config = parse([name], "quickstart", FLAGS).config
    path = tmp_path / "config.yaml"
    path.write_text(dump(config), encoding="utf-8")
    assert build(read_yaml(path), {}, path) == config


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"optim.base_lr": 0.1 + 0.2, "optim.weight_decay": 1e-7, "schedule.min_lr": 3e-300},
        {"data.color_jitter": [0.1, 0.2, 0.3], "schedule.milestones": [1.5, 2], "optim.betas": [0.5, 0.75]},
        {"run.name": "1e3", "tracking.experiment": "yes", "tracking.uri": "null"},
        {"run.name": "2024-01-01", "data.path": "~/a b/ü", "data.cache_path": "0123"},
        {"train.max_steps": 10**15, "train.clip_grad_norm": 1e-30, "checkpoint.every_epochs": None},
    ],
)
def test_dump_and_read_is_the_identity(overrides, tmp_path):
    config = build({}, overrides, "test")
    path = tmp_path / "config.yaml"
    path.write_text(dump(config), encoding="utf-8")
    assert build(read_yaml(path), {}, path) == config


def test_flattened_keys_are_those_that_an_override_takes():
    config = build({}, {}, "test")
    keys = flatten(config)
    assert keys["data.crop_scale"] == [0.08, 1.0]
    assert keys["run.storage_path"] == "runs"
    words = [f"{key}={yaml.safe_dump(value, default_flow_style=True)}" for key, value in keys.items()]
    assert parse([*words, str(ROOT / "configs/quickstart.yaml")], "quickstart", FLAGS).config == config


@pytest.mark.parametrize("name", ["2024-01-02", "2024-13-45", "20240102", "1e3", "on"])
def test_a_name_is_text_whatever_it_looks_like(name):
    assert parse([f"run.name={name}"], "quickstart", FLAGS).config.run.name == name


def test_a_config_does_not_change():
    with pytest.raises(ValueError, match="frozen"):
        build({}, {}, "test").train.epochs = 3


# values


@pytest.mark.parametrize("text", ["1e-3", "0.001", "1.0e-3", "'1e-3'"])
def test_a_small_number_may_be_written_in_any_way(text):
    assert parse([f"optim.base_lr={text}"], "quickstart", FLAGS).config.optim.base_lr == 0.001


def test_a_number_without_a_point_in_a_file_is_a_float(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("optim:\n  base_lr: 1e-3\n")
    assert parse([str(path)], "quickstart", FLAGS).config.optim.base_lr == 0.001


def test_null_turns_a_thing_off_and_is_refused_where_there_is_no_off():
    config = parse(["resnet50_imagenet", "train.clip_grad_norm=null", "data.color_jitter=null"], "", FLAGS).config
    assert config.train.clip_grad_norm is None
    assert config.data.color_jitter is None
    message = refused("optim.base_lr=null")
    assert message.startswith("optim.base_lr: ")
    assert "None" in message


def test_a_list_is_overridden_as_a_whole():
    words = ["resnet50_imagenet", "data.crop_scale=[0.25, 1]", "schedule.milestones=[1, 2.5]"]
    words.append("data.color_jitter=[0.1, 0.2, 0.3]")
    config = parse(words, "", FLAGS).config
    assert config.data.crop_scale == (0.25, 1.0)
    assert config.schedule.milestones == (1.0, 2.5)
    assert config.data.color_jitter == (0.1, 0.2, 0.3)
    assert refused("data.crop_scale=[0.5]").startswith("data.crop_scale: ")
    assert refused("data.mean=[0.5, 0.5, 0.5, 0.5]").startswith("data.mean: ")
    assert refused("data.mean=[0.5, red, 0.5]").startswith("data.mean: ")


def test_overrides_win_over_the_file_and_the_last_one_wins():
    request = parse(["train.epochs=7", "quickstart", "train.epochs=8", "--resume"], "", FLAGS)
    assert request.config.train.epochs == 8
    assert request.config.model.name == "resnet50"
    assert request.overrides == {"train.epochs": 8}
    assert request.flags == {"--resume"}


def test_a_value_may_hold_an_equals_sign():
    uri = "postgresql://h/db?user=a&password=b"
    assert parse([f"tracking.uri={uri}"], "quickstart", FLAGS).config.tracking.uri == uri


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("optim.base_lr=0", "0"),
        ("optim.base_lr=-1", "-1"),
        ("optim.base_lr=.inf", "inf"),
        ("optim.base_lr=.nan", "nan"),
        ("optim.base_lr=fast", "fast"),
        ("optim.momentum=1", "1"),
        ("optim.betas=[0.9, 1.0]", "1.0"),
        ("optim.name=adam", "adam"),
        ("train.epochs=0", "0"),
        ("train.epochs=2.5", "2.5"),
        ("train.epochs=-1", "-1"),
        ("train.max_steps=-1", "-1"),
        ("train.micro_batch_size=1", "1"),
        ("train.label_smoothing=1", "1"),
        ("train.ema_decay=1", "1"),
        ("train.clip_grad_norm=0", "0"),
        ("train.precision=fp64", "fp64"),
        ("data.image_size=7", "7"),
        ("data.flip=1.5", "1.5"),
        ("data.crop_scale=[0.5, 1.5]", "1.5"),
        ("data.crop_scale=[0.9, 0.5]", "0.5"),
        ("data.crop_scale=[0, 1]", "0"),
        ("data.crop_ratio=[2, 1]", "1"),
        ("data.std=[0.1, 0.1, 0]", "0"),
        ("data.color_jitter=[0.1, 0.1, 2]", "2"),
        ("data.eval_resize=16", "16"),
        ("run.seed=-1", "-1"),
        ("run.seed=4294967296", "4294967296"),
        ("run.name=../up", "../up"),
        ("scaling.num_workers=0", "0"),
        ("checkpoint.keep_last=0", "0"),
        ("comm.reduction=sum", "sum"),
    ],
)
def test_a_value_out_of_range_is_refused_by_key_and_value(word, named):
    message = refused(word)
    section, key = word.split("=")[0].split(".")
    assert section in message
    assert key in message
    assert named in message
    assert "pydantic" not in message
    assert "Traceback" not in message


def test_every_fault_is_named_at_once_with_its_file():
    message = fails({"train": {"epochs": 0, "log_every": 0}, "optim": {"base_lr": "x"}})
    assert len(message.splitlines()) == 3
    for key in ("train.epochs", "train.log_every", "optim.base_lr"):
        assert key in message
    assert message.count("recipe.yaml") == 3


def test_the_file_is_not_blamed_for_an_override():
    assert "recipe.yaml" not in fails({}, {"train.epochs": 0})


def test_nesterov_without_momentum_is_refused_with_the_fix():
    assert "optim.nesterov=false" in fails({"optim": {"momentum": 0.0}})
    assert build({"optim": {"momentum": 0.0, "nesterov": False}}, {}, "").optim.momentum == 0


# unknown words


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("train.epoch=3", "train.epochs"),
        ("optim.lr=0.1", "optim."),
        ("base_lr=0.1", "optim.base_lr"),
        ("train.base_lr=0.1", "optim.base_lr"),
        ("trian.epochs=3", "train.epochs"),
        ("data.img_size=64", "data.image_size"),
        ("scaling.workers=3", "scaling.num_workers"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(word, nearest):
    message = refused(word)
    assert f"unknown key {word.split('=')[0]}" in message
    assert f"did you mean {nearest}" in message


def test_an_unknown_key_or_section_in_a_file_names_the_nearest_and_the_file():
    message = fails({"optim": {"base_rl": 0.1}})
    assert "unknown key optim.base_rl, did you mean optim.base_lr" in message
    assert "recipe.yaml" in message
    message = fails({"trian": {"epochs": 3}})
    assert "unknown key trian, did you mean train" in message
    assert "recipe.yaml" in message


def test_a_key_like_none_other_is_still_refused():
    assert "unknown key qqq.zzz" in refused("qqq.zzz=1")


def test_an_unknown_option_or_config_names_the_nearest():
    assert "unknown option --resum, did you mean --resume" in refused("--resum")
    message = refused("resnet50_imagnet")
    assert "resnet50_imagenet" in message
    assert "did you mean" in message
    assert "one config at a time" in refused("quickstart", "resnet50_4gpu")


@pytest.mark.parametrize("text", ["- a\n- b\n", "train: 3\n", "train:\n", "a: [\n", "\x00", "just words"])
def test_a_file_that_is_no_config_is_refused_by_name(text, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        parse([str(path)], "quickstart", FLAGS)


def test_a_missing_or_binary_file_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        find_config(str(tmp_path / "none.yaml"))
    path = tmp_path / "bytes.yaml"
    path.write_bytes(b"\xff\xfe\x80")
    with pytest.raises(ConfigError, match=r"bytes\.yaml"):
        read_yaml(path)


def test_an_empty_file_is_all_defaults(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing\n")
    assert build(read_yaml(path), {}, path) == Config()


# A15: the batch is global, and the learning rate follows from it alone


@pytest.mark.parametrize("num_workers", [1, 2, 4])
@pytest.mark.parametrize("micro", [2, 4, 8, 16])
def test_peak_lr_follows_from_the_global_batch_for_any_workers_and_micro_batches(num_workers, micro):
    config = build(
        {"train": {"global_batch_size": 64, "micro_batch_size": micro}, "optim": {"base_lr": 0.1}},
        {"scaling.num_workers": num_workers},
        "",
    )
    assert peak_lr(config) == pytest.approx(0.025)
    schedule = make_schedule(config, make_plan(config.train, 6400))
    assert schedule(5 * 100) == pytest.approx(0.025)
    assert max(schedule(step) for step in range(9000)) == pytest.approx(0.025)


@pytest.mark.parametrize(("rule", "expected"), [("linear", 0.1 * 0.25), ("sqrt", 0.1 * 0.5), ("none", 0.1)])
def test_the_rules_of_learning_rate_scaling(rule, expected):
    config = build({"train": {"global_batch_size": 64}, "schedule": {"lr_scaling": rule}}, {}, "")
    assert peak_lr(config) == pytest.approx(expected)


def test_a_global_batch_that_micro_batches_do_not_fill_is_refused_with_the_nearest_that_do():
    message = fails({"train": {"global_batch_size": 10, "micro_batch_size": 4}})
    assert "10" in message
    assert "8 or 12" in message
    message = fails({"train": {"global_batch_size": 3, "micro_batch_size": 4}})
    assert message.endswith(": 4")
    assert " 0" not in message


def test_more_workers_than_micro_batches_are_refused_with_the_most_that_fit():
    values = {"train": {"global_batch_size": 4096, "micro_batch_size": 128}}
    assert build(values, {"scaling.num_workers": 32}, "").scaling.num_workers == 32
    message = fails(values, {"scaling.num_workers": 33})
    for word in ("33", "32", "scaling.num_workers", "train.micro_batch_size"):
        assert word in message


def test_a_resumed_run_may_change_its_speed_but_not_its_recipe():
    old = build({}, {}, "")
    faster = {"scaling.num_workers": 4, "train.log_every": 3, "data.num_threads": 2, "comm.bucket_cap_mb": 5}
    faster |= {"data.path": "/elsewhere", "checkpoint.keep_last": 9, "tracking.enabled": False}
    assert changed_recipe(old, build({}, faster, "")) == []
    other = {"run.seed": 1, "optim.base_lr": 0.2, "train.micro_batch_size": 32, "comm.reduction": "exact"}
    assert [line.split(":")[0] for line in changed_recipe(old, build({}, other, ""))] == [
        "run.seed", "optim.base_lr", "train.micro_batch_size", "comm.reduction",
    ]  # fmt: skip


@pytest.mark.parametrize("lossy", ["comm.compression=powersgd", "comm.compression=onebit", "optim.name=onebit_adam"])
def test_buckets_that_have_a_scale_or_matrices_stay_as_they_are(lossy):
    key, value = lossy.split("=")
    old, new = (build({}, {key: value, "comm.bucket_cap_mb": size}, "") for size in (25, 5))
    assert changed_recipe(old, new) == ["comm.bucket_cap_mb: 25.0 -> 5.0"]


# the command line


def run_fit(*words, **environment):
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "raytrain.fit", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=60,
        check=False,
    )
    return done, time.monotonic() - start


def test_help_prints_every_config_and_every_key_with_its_docstring():
    text = " ".join(help_text("usage").split())
    for name in SHIPPED:
        assert name in text
    for section, field in Config.model_fields.items():
        for key, leaf in field.annotation.model_fields.items():
            assert f"{section}.{key}=" in text
            assert leaf.description, f"{section}.{key} has no docstring"
            assert " ".join(leaf.description.split()) in text


def test_help_answers_in_seconds_without_torch_ray_or_mlflow():
    code = (
        "import sys; from raytrain.fit import main; code = main(['--help'])\n"
        "print([m for m in ('torch', 'ray', 'mlflow', 'numpy') if m in sys.modules], code, file=sys.stderr)"
    )
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert time.monotonic() - start < 5
    assert done.stderr.strip() == "[] 0"
    assert "optim.base_lr=0.1" in done.stdout


def test_a_mistake_is_one_message_and_exit_code_2_in_seconds():
    done, seconds = run_fit("resnet50_imagenet", "scaling.num_workers=33", "--dry-run")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("raytrain: ")
    assert "33" in done.stderr
    assert "32 micro-batches" in done.stderr
    assert "Traceback" not in done.stderr
    assert seconds < 10


def dry_run(capsys, *words):
    assert main([*words, "--dry-run"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("num_workers", "shares", "lost"),
    [(32, "1 micro-batch a worker", "0%"), (8, "4 micro-batches a worker", "0%"), (3, "11/11/10", "3%")],
)
def test_dry_run_of_imagenet_for_32_8_and_3_workers(capsys, num_workers, shares, lost):
    out = dry_run(capsys, "resnet50_imagenet", f"scaling.num_workers={num_workers}")
    assert "32 micro-batches of 128" in out
    assert shares in out
    assert f"; {lost} of their time" in out
    assert "peak 1.6," in out
    assert "313 steps per epoch" in out
    assert "31,300 steps" in out
    assert "1,565 warm-up steps" in out
    assert f"num_workers: {num_workers}" in out


def test_dry_run_of_the_four_gpu_recipe(capsys):
    out = dry_run(capsys, "resnet50_4gpu")
    assert "16 micro-batches of 64" in out
    assert "4 micro-batches a worker" in out
    assert "peak 0.4," in out


def test_what_a_dry_run_prints_begins_with_the_config(capsys):
    out = dry_run(capsys, "resnet50_4gpu", "optim.base_lr=1e-3")
    values = yaml.safe_load(out[: out.index("\nimages ")])
    assert build(values, {}, "") == parse(["resnet50_4gpu", "optim.base_lr=1e-3"], "", FLAGS).config


def test_dry_run_of_the_quickstart_counts_its_images(capsys, tmp_path):
    out = dry_run(capsys, f"data.cache_path={tmp_path}")
    assert "1,438 for training, 45 steps per epoch" in out  # 44 of 32 and one of 30
    assert "270 steps, 6 epochs" in out


def test_dry_run_without_data_or_its_size_is_refused(capsys):
    assert main(["resnet50_imagenet", "data.num_train_images=null", "--dry-run"]) == 2
    assert "data.path" in capsys.readouterr().err


def test_a_warm_up_longer_than_the_run_is_refused_by_the_command(capsys):
    assert main(["quickstart", "schedule.warmup_epochs=6", "--dry-run"]) == 2
    assert "warmup_epochs" in capsys.readouterr().err
    assert main(["resnet50_imagenet", "train.max_steps=1565", "--dry-run"]) == 2
    assert "1565 steps" in capsys.readouterr().err

"""The schema of a run: every key, what it means, and what it may be.

A config is read once and never changes. The docstring under a field is what `--help` prints. Validators
check and never change a value; what follows from the values is computed in `plan` and `schedule`. This
module loads neither torch nor ray, so that a mistake in a config is answered at once.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator


class Section(BaseModel):
    """One part of the config. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class Run(Section):
    """Where a run lives, and its seed."""

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run, and of its directory. None: the config's name and the time."""
    storage_path: str = "runs"
    """Directory that holds run directories; on a cluster one that all nodes share, s3://BUCKET/FOLDER or
    gs://BUCKET/FOLDER."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Fixes initial weights, sample order and augmentation."""


class Data(Section):
    """Which images, and what is done to them."""

    source: Literal["digits", "folder", "arrow", "parquet", "webdataset"] = "folder"
    """`digits`: scikit-learn's handwritten digits. `folder`: path/train/CLASS/* and path/val/CLASS/*. `arrow`: what
    `python -m raytrain.prepare` wrote. `parquet`, `webdataset`: files or tar shards in path/train/ and path/val/, or
    with train and val (or validation) in their names; made into Arrow shards under cache_path on first use."""
    path: str | None = None
    """Root of the dataset: a folder, s3://BUCKET/FOLDER or gs://BUCKET/FOLDER."""
    image_column: str | None = None
    """Column of a Parquet file that holds the images. None: found from the schema."""
    label_column: str | None = None
    """Column of a Parquet file that holds the labels, integers or strings. None: found from the schema."""
    on_bad_image: Literal["fail", "skip"] = "fail"
    """What an image that cannot be decoded does. `fail`: ends the run. `skip`: it is left out of its step, counted
    as data/bad_images, and listed in bad_images.jsonl in the run directory."""
    max_bad_fraction: float = Field(default=0.01, ge=0, le=1)
    """Share of the training or of the validation images that may be bad under `skip`; with more the run ends."""
    image_size: int = Field(default=224, ge=8, le=4096)
    """Height and width of a training and evaluation image, pixels."""
    train_crop: Literal["random_resized", "resize"] = "random_resized"
    """`random_resized`: a random part of the image, resized. `resize`: as in evaluation, nothing random."""
    crop_scale: tuple[float, float] = (0.08, 1.0)
    """Least and greatest share of the image's area in a random crop."""
    crop_ratio: tuple[float, float] = (0.75, 4 / 3)
    """Least and greatest width over height of a random crop."""
    flip: float = Field(default=0.0, ge=0, le=1)
    """Probability of a horizontal flip."""
    color_jitter: tuple[float, float, float] | None = None
    """Greatest relative change of brightness, contrast and saturation. None: off."""
    auto_augment: Literal["randaugment", "trivialaugment"] | None = None
    """`randaugment` or `trivialaugment`: operations drawn at random (arXiv 1909.13719; wide form of 2103.10158).
    None: off."""
    randaugment_ops: int = Field(default=2, ge=1)
    """Operations that RandAugment applies to an image."""
    randaugment_magnitude: int = Field(default=9, ge=0, le=30)
    """Strength of RandAugment's operations; 30 is the greatest."""
    random_erasing: float = Field(default=0.0, ge=0, le=1)
    """Probability that a rectangle is filled with `mean` (arXiv 1708.04896)."""
    mixup_alpha: float | None = Field(default=None, gt=0)
    """MixUp (arXiv 1710.09412): parameter of its Beta distribution. None: off."""
    cutmix_alpha: float | None = Field(default=None, gt=0)
    """CutMix (arXiv 1905.04899): parameter of its Beta distribution. None: off. With mixup_alpha set too, each image
    takes one of the two."""
    eval_resize: int | None = Field(default=None, ge=8)
    """Short side before the centre crop in evaluation, pixels. None: image_size (nothing is cropped but
    what makes the image square)."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Mean of red, green and blue that is subtracted, on a scale of 0 to 1."""
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    """Standard deviation of red, green and blue that is divided by."""
    num_threads: int | None = Field(default=None, ge=1)
    """Loader threads a worker. None: as many as the worker has CPUs."""
    cache_path: Path = Path("~/.cache/raytrain")
    """Directory of each node's own for data made ready to be read."""
    cache_gib: float | None = Field(default=None, gt=0)
    """Most that datasets under cache_path may take together; the ones not used for longest make room. None: off."""
    num_train_images: int | None = Field(default=None, ge=2)
    """Size of the training set for `--dry-run` where the data is not at hand. Training counts for itself."""

    @model_validator(mode="after")
    def _check(self) -> "Data":
        if self.source == "digits" and self.path is not None:
            raise ValueError(
                f"path {self.path} is set, but source is digits (quickstart's), which has none; set data.source to the "
                "form that your images are in, such as folder"
            )
        for key, low in (("crop_scale", self.crop_scale), ("crop_ratio", self.crop_ratio)):
            if not 0 < low[0] <= low[1]:
                raise ValueError(f"{key} must be two positive numbers, the smaller first, not {list(low)}")
        if self.crop_scale[1] > 1:
            raise ValueError(f"crop_scale is a share of the image's area, at most 1, not {self.crop_scale[1]}")
        if min(self.std) <= 0:
            raise ValueError(f"std must be positive, not {list(self.std)}")
        if self.color_jitter is not None and not all(0 <= j <= 1 for j in self.color_jitter):
            raise ValueError(f"color_jitter must lie within 0 and 1, not {list(self.color_jitter)}")
        if self.eval_resize is not None and self.eval_resize < self.image_size:
            raise ValueError(
                f"eval_resize {self.eval_resize} is smaller than image_size {self.image_size}: "
                "the centre crop would not fit"
            )
        return self


class Model(Section):
    """The network."""

    name: str = "resnet50"
    """Any classification model of torchvision, by the name that torchvision.models.list_models() gives."""
    zero_init_residual: bool = True
    """Start each residual block as the identity (arXiv 1706.02677), where the model has that option."""


class Optim(Section):
    """The optimizer."""

    name: Literal["sgd", "adamw", "onebit_adam"] = "sgd"
    """`sgd`: with Nesterov momentum. `adamw`: decoupled weight decay (arXiv 1711.05101). `onebit_adam`: the same while
    it warms up, then with the variance frozen and the momentum sent as signs (arXiv 2102.02888)."""
    base_lr: float = Field(default=0.1, gt=0)
    """Learning rate at `schedule.base_batch_size`; the peak follows by `schedule.lr_scaling`."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of SGD."""
    nesterov: bool = True
    """Nesterov's form of the momentum."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    freeze_step: int = Field(default=100, ge=1)
    """Steps after which `onebit_adam` freezes the variance and compresses; best after the learning rate's warm-up."""
    weight_decay: float = Field(default=1e-4, ge=0)
    """Weight decay of weights; biases and normalisation layers have none."""

    @model_validator(mode="after")
    def _check(self) -> "Optim":
        if self.name == "sgd" and self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0; set optim.nesterov=false")
        if not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"betas must lie within 0 and 1, not {list(self.betas)}")
        return self


class Schedule(Section):
    """The learning rate as a function of the step."""

    lr_scaling: Literal["linear", "sqrt", "none"] = "linear"
    """How the peak grows with global_batch_size / base_batch_size."""
    base_batch_size: int = Field(default=256, ge=1)
    """Global batch size at which the peak equals base_lr."""
    warmup_epochs: float = Field(default=5.0, ge=0)
    """Epochs of linear warm-up from near zero to the peak."""
    decay: Literal["cosine", "multistep", "constant"] = "cosine"
    """What follows the warm-up."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate of the last step under cosine decay."""
    milestones: tuple[float, ...] = (30.0, 60.0, 80.0)
    """Epochs at which multistep decay multiplies by gamma."""
    gamma: float = Field(default=0.1, gt=0, le=1)
    """Factor of multistep decay."""


class Train(Section):
    """Length, batch sizes, precision."""

    epochs: int = Field(default=90, ge=1)
    """Passes over the training set."""
    max_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of the run, in place of `epochs`; the schedule fits itself to it. None: off."""
    global_batch_size: int = Field(default=256, ge=2)
    """Images an optimizer step, over all workers."""
    micro_batch_size: int = Field(default=64, ge=2)
    """Images a forward pass: what batch norm sees together, and what a worker must hold at once."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Of the forward and backward pass. `auto`: bf16 where the device computes in it, else fp16 on GPUs and
    fp32 on CPUs. Evaluation is always in fp32."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Label smoothing of the training loss (arXiv 1512.00567)."""
    clip_grad_norm: float | None = Field(default=None, gt=0)
    """Greatest L2 norm of the whole gradient; longer ones are scaled down to it. None: off."""
    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    """Decay a step of an exponential moving average of weights and buffers, which is then what is
    evaluated and exported. None: off."""
    eval_every_epochs: int = Field(default=1, ge=1)
    """Evaluate after every so many epochs, and at the end."""
    log_every: int = Field(default=10, ge=1)
    """Steps between logged training metrics."""
    step_timeout_seconds: float | None = Field(default=600.0, gt=0)
    """A step that takes longer is ended, with a message of which rank is late and where in the code, and the run goes
    on from its newest checkpoint. None: off."""

    @model_validator(mode="after")
    def _check(self) -> "Train":
        batch, micro = self.global_batch_size, self.micro_batch_size
        if batch % micro:
            below, above = batch // micro * micro, -(-batch // micro) * micro
            sizes = " or ".join(str(size) for size in (below, above) if size)
            raise ValueError(
                f"global_batch_size {batch} is no multiple of micro_batch_size {micro}; the nearest that are: {sizes}"
            )
        return self


class Comm(Section):
    """How gradients are reduced over the workers. `python -m raytrain.bench comm` measures what it is worth."""

    reduction: Literal["float", "exact"] = "float"
    """`float`: DistributedDataParallel's sums. `exact`: integer sums, the same bits for any number of workers
    with the same number of CPUs each."""
    strategy: Literal["fixed", "auto"] = "fixed"
    """`fixed`: as the keys below say. `auto`: at each start latency, bandwidth and computation are measured, and the
    topology with the shortest predicted step is taken."""
    auto_bf16: bool = False
    """Let `auto` take bf16 compression too."""
    compression: Literal["none", "fp16", "bf16", "powersgd", "onebit"] = "none"
    """What goes over the wire. `fp16`, `bf16`: half of the bits. `powersgd`: matrices of low rank (arXiv 1905.13727).
    `onebit`: signs, with a scale a bucket and error feedback (Seide 2014; arXiv 1901.09847). With the hierarchical
    topology between nodes only."""
    topology: Literal["flat", "hierarchical"] = "flat"
    """`flat`: one ring of all workers. `hierarchical`: sums inside each node, then between nodes, then spreads them
    inside."""
    workers_per_node: int | None = Field(default=None, ge=1)
    """Workers that count as a node for the hierarchical topology, by rank. None: those that are on one node of Ray, or
    on one host."""
    overlap: Literal["backward", "next_step"] = "backward"
    """What the reduction runs beside. `backward`: the rest of the backward pass. `next_step`: the next step's
    computation too; gradients are applied one step late, the last one at the end."""
    sync: Literal["every_step", "local_sgd", "async"] = "every_step"
    """`every_step`: one gradient for all workers. `local_sgd`: each worker steps by its own gradients, and every
    `period` steps weights and momentum are averaged (arXiv 1808.07217). `async`: workers push gradients to a parameter
    server, and pull weights, without waiting for each other; needs Ray."""
    period: int = Field(default=8, ge=1)
    """Steps from one average of `local_sgd` to the next; under `async`, steps after which workers wait for each other
    and agree on metrics. They do so before evaluations and checkpoints too."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps with one gradient for all workers before `local_sgd` begins."""
    delay_compensation: float = Field(default=0.04, ge=0)
    """Under `async`, how much of a gradient's change since it was computed is made up for: lambda of arXiv 1609.08326.
    0: off."""
    powersgd_rank: int = Field(default=4, ge=1)
    """Rank of PowerSGD's matrices."""
    powersgd_warm_start: bool = True
    """Begin each of PowerSGD's iterations from the matrices of the step before."""
    powersgd_start_step: int = Field(default=10, ge=2)
    """Steps without compression before PowerSGD begins."""
    bucket_cap_mb: float = Field(default=25.0, gt=0)
    """Size of DistributedDataParallel's buckets, MiB; float reduction only."""
    gradient_as_bucket_view: bool = True
    """Let gradients lie in the buckets, which saves a copy of them; float reduction only."""
    static_graph: bool = False
    """Tell DistributedDataParallel that each pass uses the same parameters in the same order; float reduction only."""

    @property
    def keeps_state(self) -> bool:
        """Whether a step needs to know of the gradients of the steps before."""
        return self.compression in ("powersgd", "onebit") or self.overlap == "next_step"

    @model_validator(mode="after")
    def _check(self) -> "Comm":
        if self.reduction == "exact":
            self._refuse(
                "comm.reduction=exact sums the integers of one step, the same on all workers",
                compression="none",
                overlap="backward",
                sync="every_step",
            )
        if self.sync == "local_sgd":
            self._refuse("comm.sync=local_sgd sends weights, no gradients", compression="none", overlap="backward")
        if self.sync == "async":
            self._refuse(
                "comm.sync=async sends gradients to one server, and nothing from worker to worker",
                compression="none",
                topology="flat",
                overlap="backward",
            )
        if self.compression == "powersgd":
            self._refuse(
                "comm.compression=powersgd draws from torch's generator, from which the next step's network draws too",
                overlap="backward",
            )
        if self.strategy == "auto":
            self._refuse(
                "comm.strategy=auto chooses how the float sums of a step go",
                reduction="float",
                compression="none",
                topology="flat",
                overlap="backward",
                sync="every_step",
            )
        if self.auto_bf16 and self.strategy == "fixed":
            raise ValueError("comm.auto_bf16 is of comm.strategy=auto; set comm.compression=bf16 instead")
        self._refuse_without("sync", ["local_sgd"], "warmup_steps")
        self._refuse_without("sync", ["local_sgd", "async"], "period")
        self._refuse_without("sync", ["async"], "delay_compensation")
        powersgd = "powersgd_rank", "powersgd_warm_start", "powersgd_start_step"
        self._refuse_without("compression", ["powersgd"], *powersgd)
        buckets = "bucket_cap_mb", "gradient_as_bucket_view", "static_graph"
        self._refuse_without("reduction", ["float"], *buckets)
        if self.workers_per_node is not None and self.topology == "flat" and self.strategy == "fixed":
            raise ValueError(
                f"comm.workers_per_node {self.workers_per_node} is set, and comm.topology is flat, which knows no "
                "nodes; set comm.topology=hierarchical, or leave it out"
            )
        return self

    def _refuse(self, reason: str, **needed: str) -> None:
        for key, value in needed.items():
            if getattr(self, key) != value:
                raise ValueError(f"comm.{key} {getattr(self, key)} does not go with that: {reason}; set {key}={value}")

    def _refuse_without(self, mode: str, values: list[str], *keys: str) -> None:
        """Refuses keys that are not what they are by default, and that nothing reads in the present mode."""
        for key in keys:
            value, present = getattr(self, key), getattr(self, mode)
            if present not in values and value != type(self).model_fields[key].default:
                needed = f"comm.{mode}={' or '.join(values)}"
                raise ValueError(f"comm.{key} {value} is of {needed}, and comm.{mode} is {present}; leave it out")


class Elastic(Section):
    """A number of workers that follows the cluster."""

    min: int = Field(ge=1)
    """Fewest workers to train with."""
    max: int = Field(ge=1)
    """Most workers to train with."""

    @model_validator(mode="after")
    def _check(self) -> "Elastic":
        if self.min > self.max:
            raise ValueError(f"min {self.min} is more than max {self.max}")
        return self


class Scaling(Section):
    """The workers. Changes the speed of a run, not its result."""

    num_workers: Annotated[
        Annotated[int, Field(ge=1), Tag("fixed")] | Annotated[Elastic, Tag("elastic")],
        Discriminator(lambda value: "fixed" if isinstance(value, int | float | str) else "elastic"),
    ] = 1
    """Training processes, one a GPU, or on CPUs sharing the cores. `{min: 1, max: 8}`: as many of them as the cluster
    has room for; nodes that come are taken in, and when some leave the run goes on with the others."""
    use_gpu: bool | None = None
    """Train on GPUs. None: if the cluster has any."""
    cpus_per_worker: int | None = Field(default=None, ge=1)
    """CPUs of a worker, and its number of compute threads. None: an even share of the cluster's."""
    max_failures: int = Field(default=3, ge=0)
    """Failures within `failure_window_seconds` after which the run is started anew from its newest checkpoint; with one
    more it fails. Workers that come and go, and stops that were asked for, do not count."""
    failure_window_seconds: float = Field(default=3600.0, gt=0)
    """Failures that are longer ago are forgotten."""
    node_wait_seconds: float = Field(default=600.0, ge=0)
    """How long a run that has begun waits for nodes when those that are left cannot hold its workers."""

    @property
    def min_workers(self) -> int:
        """Fewest workers to train with."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers.min

    @property
    def max_workers(self) -> int:
        """Most workers to train with."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers.max


class Checkpoint(Section):
    """What is saved, and kept."""

    every_epochs: int | None = Field(default=1, ge=1)
    """Save after every so many epochs. None: off. The end of a run is always saved. Saving happens beside the steps."""
    every_steps: int | None = Field(default=None, ge=1)
    """Save after every so many steps. None: off."""
    every_seconds: float | None = Field(default=None, gt=0)
    """Save at the next logged step (train.log_every) when the last save is so long ago. None: off."""
    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints to keep."""
    keep_best: int = Field(default=1, ge=0)
    """Checkpoints with the best value of `best_by` to keep, beside the newest."""
    best_by: Literal["val/top1", "val/loss"] = "val/top1"
    """What the best checkpoint is the best by: the greatest accuracy, or the least loss."""


class Tracking(Section):
    """MLflow."""

    enabled: bool = True
    """Record the run in MLflow. The run directory has everything in any case."""
    uri: str | None = None
    """Tracking server or store. None: MLFLOW_TRACKING_URI, else mlflow.db in the launch directory."""
    experiment: str = Field(default="raytrain", min_length=1)
    """MLflow experiment."""
    log_checkpoints: bool = True
    """Store the best and the last checkpoint there too."""
    system_metrics: bool = True
    """CPU, memory, disk, network and GPU use of rank 0's machine."""
    log_model: bool = True
    """Store the trained model, ready for mlflow.pyfunc, when the run is done."""


class Config(Section):
    """A whole run."""

    run: Run = Run()
    data: Data = Data()
    model: Model = Model()
    optim: Optim = Optim()
    schedule: Schedule = Schedule()
    train: Train = Train()
    comm: Comm = Comm()
    scaling: Scaling = Scaling()
    checkpoint: Checkpoint = Checkpoint()
    tracking: Tracking = Tracking()

    @model_validator(mode="after")
    def _check(self) -> "Config":
        micro_batches = self.train.global_batch_size // self.train.micro_batch_size
        if self.scaling.max_workers > micro_batches:
            raise ValueError(
                f"scaling.num_workers {self.scaling.max_workers} is more than the {micro_batches} micro-batches of "
                f"{self.train.micro_batch_size} that a step has; take at most {micro_batches} workers, or a smaller "
                f"train.micro_batch_size (it changes what batch norm sees)"
            )
        if self.train.max_steps is None and self.schedule.warmup_epochs >= self.train.epochs:
            raise ValueError(
                f"schedule.warmup_epochs {self.schedule.warmup_epochs:g} must be less than train.epochs "
                f"{self.train.epochs}: no step would be left for the decay; set schedule.warmup_epochs=0, say"
            )
        self._check_comm()
        return self

    def _check_comm(self) -> None:
        comm, train = self.comm, self.train
        late = comm.keeps_state or comm.sync != "every_step" or self.optim.name == "onebit_adam"
        if late and train.precision == "fp16":
            raise ValueError(
                "train.precision fp16 skips steps whose gradients overflow, which a gradient that is late, or kept as "
                "an error, cannot be; take bf16 or fp32, or the comm keys' defaults"
            )
        if self.optim.name == "onebit_adam":
            plain = {
                "strategy": "fixed",
                "reduction": "float",
                "compression": "none",
                "overlap": "backward",
                "sync": "every_step",
            }
            for key, value in plain.items():
                if getattr(comm, key) != value:
                    raise ValueError(
                        f"comm.{key} {getattr(comm, key)} does not go with optim.name onebit_adam, which compresses "
                        f"for itself; set comm.{key}={value}"
                    )
        if comm.sync == "async" and self.optim.name != "sgd":
            raise ValueError(f"comm.sync async goes with optim.name sgd, not {self.optim.name}")
        if (comm.sync == "async" or self.optim.name == "onebit_adam") and train.clip_grad_norm is not None:
            raise ValueError(
                "train.clip_grad_norm is of the whole gradient, which no worker has under comm.sync=async or "
                "optim.name=onebit_adam; leave it out"
            )
        if (comm.sync == "async" or self.optim.name == "onebit_adam") and self.data.on_bad_image == "skip":
            raise ValueError(
                "data.on_bad_image=skip makes up for images that are missing in the whole gradient, which no worker "
                "has under comm.sync=async or optim.name=onebit_adam; set data.on_bad_image=fail"
            )
        if comm.sync == "async" and train.ema_decay is not None:
            raise ValueError("train.ema_decay needs the weights after each step, which no worker has under async")


VARIANTS = ("fixed", "elastic")
"""Of scaling.num_workers, in the places that pydantic names."""
RECIPE_SECTIONS = ("data", "model", "optim", "schedule", "train", "comm")
"""The sections that fix a run's mathematics; the others may change when a run is resumed."""
SPEED_KEYS = (
    "data.path",
    "data.num_threads",
    "data.cache_path",
    "data.cache_gib",
    "data.max_bad_fraction",
    "data.num_train_images",
    "comm.strategy",
    "comm.topology",
    "comm.workers_per_node",
    "comm.bucket_cap_mb",
    "comm.gradient_as_bucket_view",
    "comm.static_graph",
    "train.log_every",
    "train.step_timeout_seconds",
)
"""Keys inside those sections that may change too."""

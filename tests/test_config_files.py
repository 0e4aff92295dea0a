"""One YAML for the data side: layouts, roots, faults by line and key, and the commands that show, check and describe them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gpupipe import VideoLoader
from gpupipe.cli import main
from gpupipe.config import (
    ClipConfig,
    GraphConfig,
    LeakConfig,
    LoaderConfig,
    MemoryConfig,
    StageConfig,
    TrainingConfig,
    TransformConfig,
)
from gpupipe.config.document import Document, read
from gpupipe.config.schema import schema
from gpupipe.config.stage import UNBUILT
from gpupipe.config.teletron import DataPipelineConfig, FrameSamplerConfig, TeleTronConfig
from gpupipe.errors import ConfigError

SAMPLES = Path(__file__).resolve().parent.parent / "samples"
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def call(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return call


def found(document: Document[LoaderConfig]) -> list[tuple[int | None, str]]:
    return [(document.line(fault.place), ".".join(fault.place)) for fault in document.faults]


# Layouts


def test_a_root_key_makes_no_difference(write: Write) -> None:
    plain = "clip: {frames: 8, fps: 12.5}\ntransform: videomae\nbatch: 4\nseed: 3\n"
    whole = LoaderConfig.from_yaml(write(plain))
    below = "trainer: {lr: 1}\ngpupipe:\n" + "".join(f"  {line}\n" for line in plain.splitlines())
    assert LoaderConfig.from_yaml(write(below)) == whole, "also beside what is others'"
    assert LoaderConfig.from_yaml(write("gpupipe:\n")) == LoaderConfig()
    assert LoaderConfig.from_yaml(write("tele_tron:\n  data_pipeline:\n")) == LoaderConfig()


@pytest.mark.parametrize("root", ["tele_tron", "gpupipe"])
def test_teletrons_layout_means_the_same_as_ours(write: Write, root: str) -> None:
    path = write(
        f"{root}:\n  batch_size: 4\n  gradient_accumulation: 3\n  seed: 5\n  columns: caption\n  data_pipeline:\n"
        "    video_decoding: cpu\n    resolution: [96, 128]\n    drop_last: false\n"
        "    transform: {preset: diffusion, hflip: 1}\n"
        "    frame_sampler: {mode: regular, samples_per_clip: 8, stride: 2, clips_per_video: 2}\n"
    )
    assert LoaderConfig.from_yaml(path) == LoaderConfig.parse(
        {
            "batch": {"size": 12, "micro_size": 4, "last": "partial"},
            "clip": {"frames": 8, "sampling": "regular", "stride": 2, "clips_per_video": 2},
            "transform": {"preset": "diffusion", "hflip": 1, "size": (96, 128)},
            "decode": {"decoder": "cpu"},
            "columns": "caption",
            "seed": 5,
        }
    )


@pytest.mark.parametrize(
    ("keys", "batch"),
    [
        ("batch_size: 4", (4, None)),
        ("batch_size: 4, gradient_accumulation: 3", (12, 4)),
        ("batch_size: 4, gradient_accumulation: 1", (4, 4)),
        ("batch_size: 4, effective_batch_size: 16", (16, 4)),
        ("batch_size: 4, gradient_accumulation: auto, effective_batch_size: 16", (16, 4)),
        ("batch_size: 4, gradient_accumulation: 4, effective_batch_size: 16", (16, 4)),
        ("gradient_accumulation: 4", (32, 8)),
        ("effective_batch_size: 16", (16, None)),
        ("effective_batch_size: 16, gradient_accumulation: 4", (16, 4)),
        ("batch_size: dynamic", (8, "auto")),
        ("batch_size: dynamic, gradient_accumulation: auto", (8, "auto")),
        ("batch_size: dynamic, gradient_accumulation: 4", (32, "auto")),
        ("batch_size: dynamic, effective_batch_size: 48", (48, "auto")),
        ("batch_size: dynamic, effective_batch_size: 48, gradient_accumulation: auto", (48, "auto")),
    ],
)
def test_how_many_clips_a_step_has(write: Write, keys: str, batch: tuple[int, Any]) -> None:
    config = LoaderConfig.from_yaml(write(f"tele_tron: {{{keys}}}")).batch
    assert (config.size, config.micro_size) == batch


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ("batch_size: dynamic, effective_batch_size: 48, gradient_accumulation: 4", "gradient_accumulation=4 says it again"),
        ("batch_size: 4, gradient_accumulation: auto", "does not say how many clips a step has"),
        ("gradient_accumulation: auto, effective_batch_size: 8", "does not say how many clips a step has"),
        ("batch_size: 4, effective_batch_size: 10", "effective_batch_size=10 is no multiple of batch_size=4"),
        ("effective_batch_size: 10, gradient_accumulation: 4", "no multiple of gradient_accumulation=4"),
        ("batch_size: 2, gradient_accumulation: 2, effective_batch_size: 8", "is not their product"),
        ("batch_size: 0", "batch_size"),
        ("batch_size: true", "batch_size"),
        ("batch_size: dynamik", "batch_size"),
        ("gradient_accumulation: 1.5", "gradient_accumulation"),
    ],
)
def test_a_step_that_is_not_clear_is_refused_by_name(write: Write, keys: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        LoaderConfig.from_yaml(write(f"tele_tron: {{{keys}}}"))
    assert caught.value.fix


@pytest.mark.parametrize("name", sorted(UNBUILT))
@pytest.mark.parametrize(
    "text",
    ["tele_tron: {batch_size: 2, NAME: {a: 1}}", "gpupipe: {data_pipeline: {NAME: true}}", "gpupipe: {NAME: x}", "NAME: 1",
     "tele_tron: {data_pipeline: {frame_sampler: {NAME: false}}}"],
)  # fmt: skip
def test_parts_that_are_not_built_are_refused_by_name(write: Write, name: str, text: str) -> None:
    (fault,) = read(write(text.replace("NAME", name)), LoaderConfig).faults
    assert fault.message == f"'{name}' is not built yet"
    assert fault.place[-1] == name
    assert (fault.fix or "").startswith("leave it out: ")


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ("tele_tron: {batch_szie: 3}", "tele_tron.batch_szie", "did you mean 'batch_size'"),
        ("tele_tron: {sed: 3}", "tele_tron.sed", "did you mean 'seed'"),
        ("tele_tron: {data_pipeline: {video_decodin: cpu}}", "tele_tron.data_pipeline.video_decodin", "'video_decoding'"),
        ("gpupipe: {batch_size: 3, data_pipelin: {}}", "gpupipe.data_pipelin", "did you mean 'data_pipeline'"),
        ("gpupipe: {clip: {frmaes: 3}}", "gpupipe.clip.frmaes", "did you mean 'frames'"),
        ("gpupipe: {batch_szie: 3}", "gpupipe.batch_szie", "did you mean 'batch_size'"),
        ("tele_tron: {data_pipeline: {num_workers: 3}}", "tele_tron.data_pipeline.num_workers", r"decode=\{'threads': 4\}"),
        ("tele_tron: {prefetch_factor: 3}", "tele_tron.prefetch_factor", r"jitter=\{'depth': 4\}"),
        ("tele_tron: {data_pipeline: {seed: 3}}", "tele_tron.data_pipeline.seed", "write it beside data_pipeline"),
        ("tele_tron: {data_pipeline: {frame_sampler: uniform}}", "tele_tron.data_pipeline.frame_sampler", "takes a mapping"),
        ("tele_tron: {data_pipeline: {resolution: 8, size: 9}}", "tele_tron.data_pipeline", "one setting, given twice"),
        ("tele_tron: {data_pipeline: {size: 9, transform: {size: 9}}}", "tele_tron.data_pipeline", "given twice"),
        ("tele_tron: {data_pipeline: {transform: 9}}", "tele_tron.data_pipeline.transform", "name of a preset"),
        ("tele_tron: 3", "tele_tron", "takes a mapping"),
        ("tele_tron: {}\ngpupipe: {}", "tele_tron", "two roots"),
        ("seed: 1\ngpupipe: {}", "seed", "stands beside 'gpupipe', where it would not be read"),
        ("data_pipeline: {}", "data_pipeline", "stands under tele_tron: or gpupipe:"),
        ("gpupipe: {batch_size: 3, clip: {frames: 4}}", "gpupipe.clip", "mixes two layouts: 'clip' .* with 'batch_size'"),
        ("tele_tron: {jitter: {depth: 4}}", "tele_tron.jitter", "mixes two layouts"),
    ],
)
def test_what_does_not_belong_is_told_with_its_key(write: Write, text: str, key: str, says: str) -> None:
    path = write(text)
    document = read(path, LoaderConfig)
    assert [".".join(fault.place) for fault in document.faults] == [key]
    with pytest.raises(ConfigError, match=says) as caught:
        LoaderConfig.from_yaml(path)
    assert f"run.yaml:{document.line(document.faults[0].place)}: {key}: " in str(caught.value)
    assert caught.value.fix


def test_all_faults_are_told_at_once_with_their_lines(write: Write) -> None:
    """Those of fields and those of fields that do not fit each other, in either layout."""
    document = read(
        write("clip:\n  frames: 0\n  strid: 2\nbatch: x\ndecode:\n  decoder: gpu\ntransform: {hflip: 2}\n"), LoaderConfig
    )
    assert found(document) == [
        (2, "clip.frames"), (3, "clip.strid"), (4, "batch"), (6, "decode.decoder"), (7, "transform.hflip"),
    ]  # fmt: skip
    assert all(fault.fix for fault in document.faults)
    several = read(write("rank: 2\nworld_size: 2\nclip: {clips_per_video: 3}\nbatch: 4\n"), LoaderConfig)
    text = " ".join(fault.message for fault in several.faults)
    assert len(several.faults) == 2
    assert "rank=2" in text
    assert "batch.size=4" in text
    theirs = read(
        write(
            "tele_tron:\n  batch_size: 4\n  effective_batch_size: 10\n  optical_flow: {}\n  data_pipeline:\n"
            "    transform: {crop: center, short_side: 64, sise: 3}\n    resolution: 32\n    frame_sampler: {mode: best}\n"
        ),
        LoaderConfig,
    )
    assert found(theirs) == [
        (1, "tele_tron"), (4, "tele_tron.optical_flow"), (6, "tele_tron.data_pipeline.transform.sise"),
        (8, "tele_tron.data_pipeline.frame_sampler.mode"),
    ]  # fmt: skip
    assert "no multiple" in theirs.faults[0].message


def test_a_preset_that_is_not_known_hides_no_other_fault(write: Write) -> None:
    document = read(write("transform:\n  preset: kinetics_tran\n  size: 0\n  hflip: 2\n  blur: {sigma: 0}\n"), LoaderConfig)
    assert found(document) == [
        (2, "transform.preset"), (3, "transform.size"), (4, "transform.hflip"), (5, "transform.blur.sigma"),
    ]  # fmt: skip
    assert "did you mean 'kinetics_train'" in document.faults[0].message
    assert found(read(write("transform: kinetics_tran\n"), LoaderConfig)) == [(1, "transform")]
    assert found(read(write("transform: {preset: [a]}\n"), LoaderConfig)) == [(1, "transform.preset")]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("transform: {size: 0}", "size: Input should be greater than or equal to 1 (got 0)"),
        ("clip: {speed: 0}", "speed: Input should be greater than or equal to 0.015625 (got 0)"),
        ("transform: {short_side: 0}", "short_side: Input should be greater than or equal to 1 (got 0)"),
        ("transform: {color_jitter: {hue: 3}}", "hue: Input should be less than or equal to 0.5 (got 3)"),
        ("source: {epoch_length: 0}", "epoch_length: Input should be greater than or equal to 1 (got 0)"),
    ],
)
def test_a_number_that_stands_for_several_is_told_of_once(write: Write, text: str, says: str) -> None:
    (fault,) = read(write(text), LoaderConfig).faults
    assert says in fault.message
    several = read(write("transform: {size: [0, -1]}"), LoaderConfig)
    assert [key for _, key in found(several)] == ["transform.size.0", "transform.size.1"]


def test_faults_of_what_a_key_becomes_name_the_key(write: Write) -> None:
    text = "tele_tron:\n  data_pipeline:\n    frame_sampler:\n      mode: uniform\n      stride: 2\n"
    document = read(write(text), LoaderConfig)
    assert found(document) == [(3, "tele_tron.data_pipeline.frame_sampler")]
    assert "spans the whole video" in document.faults[0].message


def test_lines_are_right_behind_merged_keys(write: Write) -> None:
    document = read(write("base: &base\n  frames: 0\ngpupipe:\n  clip:\n    <<: *base\n    strid: 3\n"), LoaderConfig)
    assert found(document) == [(2, "gpupipe.clip.frames"), (6, "gpupipe.clip.strid")]
    assert document.others == ("base",)


def test_a_small_file_that_stands_for_gigabytes_is_one_short_error(write: Write) -> None:
    lines = ["x0: &x0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"x{k}: &x{k} [{', '.join([f'*x{k - 1}'] * 10)}]" for k in range(1, 12)]
    text = "\n".join([*lines, "gpupipe: {clip: {frames: *x11, a: *x11}, batch_size: *x11, data_pipeline: *x11}"])
    with pytest.raises(ConfigError) as caught:
        LoaderConfig.from_yaml(write(text))
    assert len(str(caught.value)) < 100_000
    with pytest.raises(ConfigError) as caught:
        LoaderConfig.from_yaml(write("gpupipe: &all {clip: *all}"))
    assert len(str(caught.value)) < 100_000


@pytest.mark.parametrize("text", ["a: " + "[" * 5000 + "]" * 5000, "gpupipe: " + "{a: " * 3000 + "}" * 3000])
def test_a_file_nested_too_deep_is_one_error(write: Write, text: str) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        LoaderConfig.from_yaml(write(text))


def test_a_loader_takes_the_sample_of_the_other_layout(clips: dict[str, Path]) -> None:
    with VideoLoader(
        [str(clips["h264"])] * 64, config=SAMPLES / "tele_tron.yaml", device="cpu", transform={"size": 24}
    ) as loader:
        assert (loader.config.clip.sampling, loader.config.clip.frames) == ("stratified", 16)
        assert (loader.steps_per_epoch, loader.config.batch.micro_size) == (2, "auto")
        batch = next(iter(loader))
        assert batch.video.shape == (32, 3, 16, 24, 24)
        indices = batch.clips[0].pick.indices
        assert all(k * 60 // 16 <= index <= (k + 1) * 60 // 16 for k, index in enumerate(indices)), "one of each segment"


def test_the_same_fields_take_the_same_values_in_both_layouts() -> None:
    ours = {stage.__name__: stage.model_json_schema()["properties"] for stage in (LoaderConfig, ClipConfig, TransformConfig)}
    decode = LoaderConfig.model_fields["decode"].annotation
    assert isinstance(decode, type)
    assert issubclass(decode, StageConfig)
    theirs = FrameSamplerConfig.model_json_schema()["properties"]
    pairs = [(theirs[name], ours["ClipConfig"][own]) for name, own in
             {"mode": "sampling", "samples_per_clip": "frames", "stride": "stride", "fps": "fps", "clips_per_video": "clips_per_video"}.items()]  # fmt: skip # noqa: E501
    pipeline = DataPipelineConfig.model_json_schema()["properties"]
    pairs += [(pipeline["video_decoding"], decode.model_json_schema()["properties"]["decoder"])]
    pairs += [(pipeline[name], ours["TransformConfig"]["size"]) for name in ("resolution", "size")]
    for one, other in pairs:
        assert _bounds(one) == _bounds(other)


def _bounds(field: dict[str, Any]) -> list[dict[str, Any]]:
    """What a field takes, but for null."""
    kinds = field.get("anyOf", [field])
    plain = [{k: v for k, v in kind.items() if k not in ("description", "default", "title")} for kind in kinds]
    return [kind for kind in plain if kind != {"type": "null"}]


def test_the_examples_of_the_page_are_configurations(write: Write) -> None:
    text = (SAMPLES.parent / "docs" / "configuration.md").read_text(encoding="utf-8")
    examples = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        LoaderConfig.from_yaml(write(example))


@pytest.mark.parametrize("root", ["tele_tron: {batch_size: 2, STEP}", "gpupipe: {batch: 2, STEP}", "{batch: 2, STEP}"])
def test_a_file_has_the_training_step_beside_the_loader(write: Write, root: str) -> None:
    path = write(root.replace("STEP", "mixed_precision: fp16, cuda_graph: {warmup_steps: 7}, recompute: 12.5, memory: 20GB"))
    assert LoaderConfig.from_yaml(path) == LoaderConfig(batch=2 if "batch_size" not in root else {"size": 2})
    step = TrainingConfig.from_yaml(path)
    assert step.mixed_precision is not None
    assert step.mixed_precision.dtype == "float16"
    assert step.cuda_graph == GraphConfig(warmup_steps=7)
    assert step.recompute == 12.5
    assert step.memory == MemoryConfig(reserve="20GB")


@pytest.mark.parametrize(
    ("value", "config"),
    [
        ("on", MemoryConfig()),
        ("0.8", MemoryConfig(reserve=0.8)),
        ("off", None),
        ("{room: 4 GiB, leak_watch: on}", MemoryConfig(room="4 GiB", leak_watch=LeakConfig())),
        ("{reserve: 0.5, leak_watch: {windows: 6}}", MemoryConfig(reserve=0.5, leak_watch=LeakConfig(windows=6))),
    ],
)
@pytest.mark.parametrize("root", ["tele_tron: {batch_size: 2, memory: VALUE}", "memory: VALUE"])
def test_ways_to_write_memory(write: Write, root: str, value: str, config: MemoryConfig | None) -> None:
    assert TrainingConfig.from_yaml(write(root.replace("VALUE", value))).memory == config


def test_what_a_file_does_not_say_of_the_step_is_its_own(write: Write) -> None:
    step = TrainingConfig.from_yaml(write("gpupipe: {batch: 2}"))
    assert (step.mixed_precision, step.cuda_graph, step.recompute) == (None, None, "none")
    assert TrainingConfig.from_yaml(write("cuda_graph: off\nmixed_precision: bf16")).cuda_graph is None
    assert TrainingConfig.from_yaml(write("cuda_graph: on")).cuda_graph == GraphConfig()
    assert TrainingConfig.from_yaml(write("cuda_graph: {capture: always}")).cuda_graph == GraphConfig(capture="always")


@pytest.mark.parametrize(
    ("text", "line", "key", "says"),
    [
        ("clip: {frames: 3}\nmixed_precision: fp8", 2, "mixed_precision.dtype", "float16"),
        ("cuda_graph:\n  warm_up: 3", 2, "cuda_graph.warm_up", "warmup_steps"),
        ("tele_tron:\n  recompute: 0", 2, "tele_tron.recompute", "greater than 0"),
        ("clip: {frames: 0}\nrecompute: block", 1, "clip.frames", "frames"),
        ("cuda_graph: on\ngpupipe: {}", 1, "cuda_graph", "beside 'gpupipe'"),
        ("tele_tron:\n  memory: 20", 2, "tele_tron.memory.reserve", "an amount with its unit such as '20GB'"),
        ("clip: {frames: 3}\nmemroy: 0.8", 2, "memroy", "did you mean 'memory'"),
        ("tele_tron:\n  memroy: 0.8", 2, "tele_tron.memroy", "did you mean 'memory'"),
        ("tele_tron:\n  xyz: 0.8", 2, "tele_tron.xyz", "cuda_graph, recompute, memory"),
        ("memory:\n  room: 5\n", 2, "memory.room", "above 0 and at most 1"),
        ("memory:\n  leak_watch: {window: 5}", 2, "memory.leak_watch.window", "did you mean 'windows'"),
    ],
)
def test_faults_of_the_step_name_line_and_key(write: Write, text: str, line: int, key: str, says: str) -> None:
    (path, *_) = [write(text)]
    faults = read(path, LoaderConfig).faults
    assert found(read(path, LoaderConfig))[0] == (line, key)
    assert any(says in fault.message for fault in faults)
    for load in (LoaderConfig.from_yaml, TrainingConfig.from_yaml):
        with pytest.raises(ConfigError):
            load(path)


def test_the_step_s_keys_are_no_loader_s() -> None:
    with pytest.raises(ConfigError, match="unknown key 'cuda_graph'") as caught:
        LoaderConfig(cuda_graph={})
    assert "TrainingConfig" in (caught.value.fix or "")


def test_a_mapping_with_a_root_is_told_that_files_have_them() -> None:
    with pytest.raises(ConfigError, match="give the file's path"):
        LoaderConfig.parse({"tele_tron": {"batch_size": 3}})


_KEYS = ["gpupipe", "tele_tron", *LoaderConfig.model_fields, *TeleTronConfig.model_fields, *DataPipelineConfig.model_fields,
         *FrameSamplerConfig.model_fields, *ClipConfig.model_fields, *TrainingConfig.model_fields, *UNBUILT]  # fmt: skip
_LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.dates(), st.binary(max_size=3),
    st.sampled_from(["dynamic", "auto", "stratified", "videomae", "cpu"]),
)  # fmt: skip
_TREES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(st.one_of(st.sampled_from(_KEYS), st.integers(0, 3), st.none()), inner, max_size=5),
        st.lists(inner, max_size=3),
    ),
    max_leaves=25,
)


@settings(max_examples=150)
@given(root=st.sampled_from(["", "gpupipe", "tele_tron"]), tree=_TREES)
def test_whatever_a_file_holds_is_a_configuration_or_told(
    tmp_path_factory: pytest.TempPathFactory, root: str, tree: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(yaml.safe_dump({root: tree} if root else tree, allow_unicode=True), encoding="utf-8")
    try:
        document = read(path, LoaderConfig)
    except ConfigError:
        return
    assert (document.config is None) == bool(document.faults)
    assert all(fault.message and fault.fix for fault in document.faults)
    if document.config is not None:
        saved = path.with_name("saved.yaml")
        document.config.to_yaml(saved)
        again = LoaderConfig.from_yaml(saved)
        assert again == document.config.model_copy(update={"rank": None, "world_size": None})


# Commands


class Run:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str | Path) -> tuple[int, str]:
        with pytest.raises(SystemExit) as left:
            main(["config", *map(str, arguments)])
        return int(left.value.code or 0), self._capsys.readouterr().out


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.delenv("GPUPIPE_DEBUG", raising=False)
    return Run(capsys)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gpupipe: {clip: {fps: 5}, transform: {preset: kinetics_eval, size: 112}, jitter: {depth: 3}}",
        "transform: {affine: {degrees: 9}, erasing: {}, mix: {num_classes: 3}}\nbatch: {size: 6, buckets: {frames: [4, 8]}}\n"
        "columns: [a, 'yes', '3', 'x: #y']\nsource: {root: 'a: b # c', extensions: ['.MP4']}\n",
        "tele_tron: {batch_size: dynamic, gradient_accumulation: 4, rank: 1, world_size: 2}",
    ],
)
def test_what_is_shown_is_a_file_of_the_same_configuration(run: Run, write: Write, tmp_path: Path, text: str) -> None:
    config = LoaderConfig.from_yaml(write(text))
    code, shown = run("show", tmp_path / "run.yaml")
    assert code == 0
    assert LoaderConfig.from_yaml(write(shown)) == config
    assert set(yaml.safe_load(shown)) == set(LoaderConfig.model_fields), "in gpupipe's own layout, with every field"


def test_every_value_tells_where_it_is_from(run: Run, write: Write) -> None:
    path = write(
        "gpupipe:\n  batch_size: 4\n  gradient_accumulation: 2\n  data_pipeline:\n    transform:\n"
        "      preset: kinetics_train\n      hflip: 0.1\n"
    )
    report = json.loads(run("show", path, "--json")[1])
    origin = report["origin"]
    assert origin["batch.size"] == {"from": "file", "key": "gpupipe.gradient_accumulation", "line": 3}
    assert origin["batch.micro_size"] == {"from": "file", "key": "gpupipe.batch_size", "line": 2}
    assert origin["transform.hflip"] == {"from": "file", "key": "gpupipe.data_pipeline.transform.hflip", "line": 7}
    assert origin["transform.color_jitter.hue"] == {"from": "preset"}
    assert origin["clip.frames"] == origin["batch.last"] == origin["transform.mean"] == {"from": "default"}
    assert (report["layout"], report["config"]["batch"]["size"]) == ("tele_tron", 8)
    shown = run("show", write("seed: 3\nbatch: 2\n"))[1]
    assert re.search(r"^  size: 2 +# line 2: batch$", shown, re.MULTILINE)
    assert re.search(r"^seed: 3 +# line 1$", shown, re.MULTILINE)
    assert re.search(r"^  last: drop +# default$", shown, re.MULTILINE)
    assert "# default" in run("show")[1], "without a file, the defaults"


def test_validate_names_every_fault_of_every_file(run: Run, write: Write, tmp_path: Path) -> None:
    bad = write("clip: {frames: 0}\nbatch:\n  siz: 3\n")
    good, none = SAMPLES / "loader.yaml", tmp_path / "none.yaml"
    code, shown = run("validate", good, bad, none)
    assert code == 1
    assert f"{good}: good, gpupipe's own layout" in shown
    assert f"{bad}:1: clip.frames: " in shown
    assert f"{bad}:3: batch.siz: unknown key 'siz' in BatchConfig; did you mean 'size'?" in shown
    assert f"{none}: cannot read the configuration" in shown
    code, shown = run("validate", bad, none, "--json")
    report = json.loads(shown)
    assert (code, report["good"], [len(file["faults"]) for file in report["files"]]) == (1, False, [2, 1])
    assert {fault["key"] for fault in report["files"][0]["faults"]} == {"clip.frames", "batch.siz"}
    assert run("validate", *SAMPLES.glob("*.yaml"))[0] == 0
    assert run("validate")[0] == 2, "no file is a wrong command line"


def test_the_schema_agrees_with_the_loader(run: Run, write: Write) -> None:
    """An editor that goes by it marks what would be refused, and nothing else."""
    printed = json.loads(run("schema")[1])
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    validator.check_schema(printed)
    check = validator(printed)
    good = [
        "", "batch: 8", "batch: {size: 8, micro_size: auto}", "cache: {clips: off}",
        "transform: videomae\ncolumns: caption", "shuffle: 100",
        "transform: {size: 96, mean: 0.5, std: 0.5, fill: 0.1, color_jitter: {hue: 0.1, contrast: [0.5, 1]}}",
        "transform: {affine: {degrees: 5, shear: 3}, blur: {sigma: 1}, erasing: {value: random}}\nclip: {speed: 2, fps: 8.5}",
        "gpupipe: {clip: {frames: 3}}\ntrainer: {lr: 1}", "gpupipe: {batch_size: 3}",
        "tele_tron: {batch_size: dynamic, seed: 2}",
        "tele_tron: {data_pipeline: {resolution: 64, transform: kinetics_train, frame_sampler: {mode: keyframe}}}",
        "tele_tron: {batch_size: 2, mixed_precision: bf16, cuda_graph: true, recompute: block}",
        "recompute: 60\ncuda_graph: {max_graphs: 3}\nmixed_precision: {dtype: float16, max_scale: 1048576}\nclip: {frames: 3}",
        "recompute: 60.5 GiB",
        "tele_tron:", "gpupipe:\n  data_pipeline:", *(path.read_text() for path in SAMPLES.glob("*.yaml")),
    ]  # fmt: skip
    bad = [
        "batch: x", "batch: {siz: 1}", "clip: 3", "clip: {frames: 0}", "transform: kinetics", "transform: {hflip: 2}",
        "gpupipe: {batch_size: 3, clip: {}}", "tele_tron: {clip: {}}", "tele_tron: {optical_flow: true}",
        "tele_tron: {cuda_graph: 3}", "recompute: -1", "recompute: 0GB", "recompute: 60 heaps",
        "mixed_precision: {dtypes: bf16}",
        "cuda_graph: true\ngpupipe: {}", "tele_tron: {data_pipeline: {recompute: block}}", "seed: 1\ngpupipe: {}",
        "gpupipe: {}\ntele_tron: {}", "tele_tron: {batch_size: dynamik}", "tele_tron: {data_pipeline: {transform: kinetics}}",
        "data_pipeline: {}", "tele_tron: {data_pipeline: {frame_sampler: {mode: best}}}", "gpupipe: 3", "- 1",
    ]  # fmt: skip
    for text in good:
        assert check.is_valid(yaml.safe_load(text)), text
        LoaderConfig.from_yaml(write(text))
    for text in bad:
        assert not check.is_valid(yaml.safe_load(text)), text
        with pytest.raises(ConfigError):
            LoaderConfig.from_yaml(write(text))


def test_the_schema_says_what_each_field_is_for() -> None:
    models = schema()["$defs"]
    for model in models.values():
        for name, field in model.get("properties", {}).items():
            told = field.get("description") or models[field["$ref"].rpartition("/")[2]]["description"]
            assert told, (model["title"], name)
            assert ":class:" not in told
            assert "``" not in told
    assert "in pixels" in models["TransformConfig"]["properties"]["size"]["description"]
    assert set(models["TeleTronConfig"]["properties"]) == set(TeleTronConfig.model_fields) | set(TrainingConfig.model_fields)

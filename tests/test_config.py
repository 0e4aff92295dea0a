"""Configuration: names are checked at every level, ranges are enforced, a file holds the whole run."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpupipe.config import (
    AffineConfig,
    AutoAugmentConfig,
    BatchConfig,
    BlurConfig,
    CacheConfig,
    ClipConfig,
    ColorJitterConfig,
    DecodeConfig,
    ErasingConfig,
    JitterConfig,
    LoaderConfig,
    MixConfig,
    SourceConfig,
    StageConfig,
    TransformConfig,
)
from gpupipe.data.transform.draw import draw
from gpupipe.errors import ConfigError


@pytest.mark.parametrize(
    ("model", "values", "wrong", "right"),
    [
        (ClipConfig, {"frmes": 8}, "frmes", "frames"),
        (TransformConfig, {"sze": 224}, "sze", "size"),
        (BatchConfig, {"lst": "drop"}, "lst", "last"),
        (DecodeConfig, {"thread": 2}, "thread", "threads"),
        (JitterConfig, {"deph": 2}, "deph", "depth"),
        (SourceConfig, {"recursiv": True}, "recursiv", "recursive"),
        (LoaderConfig, {"transfrom": {}}, "transfrom", "transform"),
        (LoaderConfig, {"clip": {"strid": 2}}, "strid", "stride"),
        (LoaderConfig, {"transform": {"antialais": False}}, "antialais", "antialias"),
    ],
)
def test_an_unknown_key_names_the_nearest_one(model: type[StageConfig], values: dict[str, Any], wrong: str, right: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model(**values)
    assert f"'{wrong}'" in caught.value.message
    assert f"did you mean '{right}'?" in caught.value.message
    assert caught.value.fix


def test_an_unknown_key_like_no_other_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match="known keys: size, micro_size, last"):
        BatchConfig(zzzzzz=1)


def test_several_faults_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        LoaderConfig(clip={"frames": 0}, batch={"siz": 2}, rank=-1)
    message = caught.value.message
    assert all(part in message for part in ("ClipConfig.frames", "'siz'", "LoaderConfig.rank", "got 0", "got -1"))


@pytest.mark.parametrize(
    ("model", "values", "part"),
    [
        (ClipConfig, {"frames": 0}, "frames"),
        (ClipConfig, {"frames": 4097}, "frames"),
        (ClipConfig, {"stride": 0}, "stride"),
        (ClipConfig, {"fps": 0.0}, "fps"),
        (ClipConfig, {"fps": 10.0, "stride": 2}, "stride or fps"),
        (ClipConfig, {"sampling": "uniform", "stride": 2}, "spans the whole video"),
        (ClipConfig, {"sampling": "stratified", "fps": 8}, "spans the whole video"),
        (ClipConfig, {"sampling": "sometimes"}, "sampling"),
        (ClipConfig, {"pad": "zero"}, "pad"),
        (TransformConfig, {"size": 0}, "size"),
        (TransformConfig, {"size": (224, 9000)}, "size"),
        (TransformConfig, {"size": True}, "size"),
        (TransformConfig, {"scale": (0.9, 0.1)}, "scale must be"),
        (TransformConfig, {"scale": (0.0, 1.0)}, "scale"),
        (TransformConfig, {"ratio": (2.0, 1.0)}, "ratio must be"),
        (TransformConfig, {"ratio": (1e-300, 1.0)}, "ratio"),
        (TransformConfig, {"mean": (float("nan"), 0, 0)}, "finite"),
        (TransformConfig, {"std": (float("inf"), 1, 1)}, "finite"),
        (ClipConfig, {"fps": float("inf")}, "finite"),
        (TransformConfig, {"hflip": 1.5}, "hflip"),
        (TransformConfig, {"std": (0.0, 1.0, 1.0)}, "std"),
        (TransformConfig, {"dtype": "float64"}, "dtype"),
        (TransformConfig, {"crop": "center", "short_side": 100}, "short_side=100"),
        (BatchConfig, {"size": 0}, "size"),
        (DecodeConfig, {"threads": 0}, "threads"),
        (DecodeConfig, {"decoder": "gpu"}, "decoder"),
        (JitterConfig, {"depth": 0}, "depth"),
        (LoaderConfig, {"rank": 2, "world_size": 2}, "rank=2"),
        (LoaderConfig, {"on_bad_file": "ignore"}, "on_bad_file"),
    ],
)
def test_values_outside_their_range_are_refused(model: type[StageConfig], values: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        model(**values)


def test_one_number_is_a_square() -> None:
    assert TransformConfig(size=112).size == (112, 112)
    assert TransformConfig(size=np.int64(112)).size == (112, 112)
    assert TransformConfig(size=(96, 160)).size == (96, 160)


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(Exception, match="frozen"):
        ClipConfig().frames = 3  # type: ignore[misc]


def test_parse_takes_none_a_mapping_or_an_instance() -> None:
    clip = ClipConfig(frames=4)
    assert ClipConfig.parse(clip) is clip
    assert ClipConfig.parse({"frames": 4}) == clip
    assert ClipConfig.parse(None) == ClipConfig()
    with pytest.raises(ConfigError, match="ClipConfig expected, got list"):
        ClipConfig.parse([4])  # type: ignore[arg-type]


configurations = st.builds(
    LoaderConfig,
    clip=st.builds(ClipConfig, frames=st.integers(1, 64), stride=st.integers(1, 9), pad=st.sampled_from(["loop", "error"])),
    transform=st.builds(
        TransformConfig,
        size=st.tuples(st.integers(1, 512), st.integers(1, 512)),
        hflip=st.floats(0, 1),
        dtype=st.sampled_from(["uint8", "float32", "bfloat16"]),
    ),
    batch=st.builds(BatchConfig, size=st.integers(1, 64), last=st.sampled_from(["drop", "partial", "fill"])),
    seed=st.integers(0, 2**40),
    columns=st.lists(st.text(max_size=8), max_size=3).map(tuple),
)


@settings(max_examples=40)
@given(configurations)
def test_yaml_keeps_everything(tmp_path_factory: pytest.TempPathFactory, config: LoaderConfig) -> None:
    path = tmp_path_factory.mktemp("yaml") / "run.yaml"
    config.to_yaml(path)
    assert LoaderConfig.from_yaml(path) == config


def test_a_short_yaml_file_leaves_the_rest_at_its_default(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("clip: {frames: 8, fps: 12.5}\nbatch:\n  size: 2\n")
    config = LoaderConfig.from_yaml(tmp_path / "run.yaml")
    assert config == LoaderConfig(clip=ClipConfig(frames=8, fps=12.5), batch=BatchConfig(size=2))
    (tmp_path / "empty.yaml").write_text("")
    assert LoaderConfig.from_yaml(tmp_path / "empty.yaml") == LoaderConfig()


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (b"clip: {frames: [", "cannot read the configuration"),
        (b"- clip\n- batch\n", "holds a list"),
        (b"\xff\xfe\x00bad", "cannot read the configuration"),
        (b"clip: {framse: 3}", "did you mean 'frames'"),
        (b"clip: 3", "clip"),
        (b"3: 4", "the key 3 is not a name"),
        (b"clip: {3: 4}", "LoaderConfig.clip: the key 3 is not a name"),
    ],
)
def test_a_bad_yaml_file_is_one_clear_error(tmp_path: Path, text: bytes, part: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=part):
        LoaderConfig.from_yaml(path)


def test_a_configuration_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write the configuration"):
        LoaderConfig().to_yaml(tmp_path / "nowhere" / "run.yaml")


def test_a_fault_of_several_fields_does_not_recite_them_all() -> None:
    with pytest.raises(ConfigError) as caught:
        LoaderConfig(rank=2, world_size=2, source=SourceConfig())
    assert "extensions" not in str(caught.value)


def test_a_missing_yaml_file_is_named(tmp_path: Path) -> None:
    for name in ("nowhere.yaml", "no\0where.yaml"):
        with pytest.raises(ConfigError, match=r"cannot read the configuration .*where\.yaml"):
            LoaderConfig.from_yaml(tmp_path / name)


def test_arguments_override_single_fields_of_a_configuration(tmp_path: Path) -> None:
    """What a file says of a stage stays, but for the fields that the call names."""
    file = tmp_path / "loader.yaml"
    file.write_text("transform: {hflip: 0.0, crop: center, size: 96}\nbatch: {size: 4, last: partial}\nseed: 3\n")
    base = LoaderConfig.parse(file)
    ours = base.override({"transform": {"size": 64}, "batch": 2, "columns": "caption"})
    assert (ours.transform.size, ours.transform.crop, ours.transform.hflip) == ((64, 64), "center", 0.0)
    assert (ours.batch.size, ours.batch.last, ours.seed, ours.columns) == (2, "partial", 3, ("caption",))
    assert base.override({"transform": TransformConfig(size=32)}).transform == TransformConfig(size=32), "a model is whole"
    with pytest.raises(ConfigError, match="unknown key 'sise'"):
        base.override({"transform": {"sise": 1}})
    with pytest.raises(ConfigError, match="unknown key 'colums'"):
        base.override({"colums": ()})


def test_an_error_says_what_the_field_is_for_in_a_sentence() -> None:
    """The whole text of some fields fills a screen, with the error somewhere above it."""
    with pytest.raises(ConfigError) as long:
        LoaderConfig(jitter={"depth": 0})
    assert long.value.fix == "depth: Batches in preparation or ready, not yet taken by the consumer."
    with pytest.raises(ConfigError) as caught:
        LoaderConfig(transform={"ratio": 3})
    assert "aspect ratio" in (caught.value.fix or "")
    with pytest.raises(ConfigError) as caught:
        LoaderConfig(clip={"frame": 3})
    assert "ClipConfig has frames, stride" in (caught.value.fix or "")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("frames", r"did you mean 'clip\.frames'\?\n.*write clip=\{'frames': …\}"),
        ("size", r"did you mean 'transform\.size' or 'batch\.size'"),
        ("prefetch", r"jitter=\{'depth': …\}"),
        ("timeout", "write timeout_seconds=…"),
        ("num_workers", r"decode=\{'threads': …\}"),
        ("after", "give it to VideoLoader itself"),
        ("shuffel", "did you mean 'shuffle'"),
        ("lr", r"known keys: source.*\n.*leave it out, or write one of these"),
        ("collate_fn", "batches are made on the device"),
        ("drop_last", r"batch=\{'last': 'drop'\}"),
        ("pin_memory", "leave it out: batches are made on the device"),
    ],
)
def test_an_unknown_name_leads_to_where_it_belongs(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        LoaderConfig().override({name: 4})
    assert str(caught.value).count("did you mean") <= 1


@pytest.mark.parametrize(
    ("values", "stage"),
    [
        ({"transform": {"color_jitter": 0.4}}, ColorJitterConfig),
        ({"transform": {"color_jitter": (0.4, 0.4, 0.4, 0.1)}}, ColorJitterConfig),
        ({"transform": {"auto_augment": "randaugment"}}, AutoAugmentConfig),
        ({"transform": {"mix": True}}, MixConfig),
        ({"transform": {"affine": 10}}, AffineConfig),
        ({"transform": {"blur": True}}, BlurConfig),
        ({"transform": {"erasing": 0.25}}, ErasingConfig),
        ({"transform": 5}, TransformConfig),
        ({"clip": 16}, ClipConfig),
        ({"batch": "8"}, BatchConfig),
        ({"decode": "cpu"}, DecodeConfig),
        ({"jitter": 4}, JitterConfig),
        ({"cache": "device"}, CacheConfig),
        ({"source": "folder"}, SourceConfig),
    ],
)
def test_a_value_in_the_place_of_a_mapping_is_told_the_form(values: dict[str, Any], stage: type[StageConfig]) -> None:
    with pytest.raises(ConfigError) as caught:
        LoaderConfig.parse(values)
    assert stage.example in (caught.value.fix or "")
    stage(**ast.literal_eval(stage.example))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"hflip": True}, "TransformConfig.hflip: Input should be a number, not true or false"),
        ({"grayscale": False}, "grayscale: Input should be a number, not true or false"),
        ({"mean": (123.7, 116.3, 103.5)}, r"scale of 0 to 255 .*\n.*divide mean and std by 255"),
        ({"std": 58.4}, "scale of 0 to 255"),
        ({"mean": -0.1}, "greater than or equal to 0"),
    ],
)
def test_values_that_mean_something_else_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        TransformConfig(**fields)


def test_one_mean_stands_for_three() -> None:
    config = TransformConfig(mean=0.5, std=0.25)  # type: ignore[arg-type]
    assert (config.mean, config.std) == ((0.5,) * 3, (0.25,) * 3)


def test_torch_dtypes_are_names_too() -> None:
    import torch

    assert TransformConfig(dtype=torch.float16).dtype == "float16"  # type: ignore[arg-type]


def test_naming_one_of_stride_and_fps_takes_the_others_place() -> None:
    config = LoaderConfig.parse({"clip": {"fps": 10, "frames": 8}})
    assert config.override({"clip": {"stride": 2}}).clip == ClipConfig(stride=2, frames=8)
    assert LoaderConfig.parse({"clip": {"stride": 3}}).override({"clip": {"fps": 5.0}}).clip == ClipConfig(fps=5.0)
    with pytest.raises(ConfigError, match="not both"):
        config.override({"clip": {"stride": 2, "fps": 5.0}})


def test_a_saved_configuration_has_no_rank(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    LoaderConfig(rank=1, world_size=4, seed=5).to_yaml(path)
    again = LoaderConfig.from_yaml(path)
    assert (again.rank, again.world_size, again.seed) == (None, None, 5)


def test_several_uniform_clips_of_a_video_would_be_one() -> None:
    with pytest.raises(ConfigError, match="not clips_per_video=2"):
        LoaderConfig.parse({"clip": {"sampling": "uniform", "clips_per_video": 2}, "batch": 2})
    LoaderConfig.parse({"clip": {"sampling": "uniform", "clips_per_video": 3}, "transform": {"crop": "three"}, "batch": 3})


@pytest.mark.parametrize(
    ("values", "fix"),
    [
        ({"batch": 8, "clip": {"clips_per_video": 3}}, "use batch=6 or 9"),
        ({"batch": 2, "clip": {"clips_per_video": 3}}, "use batch=3"),
        ({"transform": {"crop": "three"}}, "set clip.clips_per_video=3"),
        ({"clip": {"stride": 2, "fps": 5}}, "leave one of them out"),
        ({"clip": {"sampling": "uniform", "fps": 5}}, "leave them out"),
        ({"rank": 2, "world_size": 2}, "ranks count from 0"),
        ({"transform": {"crop": "center", "short_side": 100, "size": 224}}, "raise short_side"),
    ],
)
def test_fields_that_do_not_fit_each_other_say_the_way_out(values: dict[str, Any], fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LoaderConfig.parse(values)
    assert fix in str(caught.value)
    assert "has source, clip" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"transform": {"dtype": "float16", "std": 1e-6}}, r"std=1e-06 make values beyond 65504"),
        ({"transform": {"dtype": "float16", "mean": 0, "std": 1e-5}}, r"std=1e-05 make values beyond 65504"),
        ({"transform": {"dtype": "float16", "erasing": {"value": 1e5}}}, r"erasing\.value=100000 is beyond 65504"),
        ({"transform": {"erasing": {"value": 1e39}}}, r"erasing\.value=1e\+39"),
        ({"transform": {"std": 1e-40}}, r"TransformConfig\.std"),
        ({"transform": {"mean": 1e308}}, r"TransformConfig\.mean"),
        ({"transform": {"color_jitter": {"brightness": (1e308, 1e308)}}}, r"ColorJitterConfig\.brightness"),
        ({"transform": {"color_jitter": {"contrast": 1e308}}}, r"ColorJitterConfig\.contrast"),
        ({"transform": {"erasing": {"ratio": (1e-310, 1e-310)}}}, r"ErasingConfig\.ratio"),
        ({"transform": {"affine": {"scale": (1e-310, 1)}}}, r"AffineConfig\.scale"),
        ({"transform": {"affine": {"shear": 89.9999999}}}, r"AffineConfig\.shear"),
        ({"transform": {"blur": {"sigma": 1e-310}}}, r"BlurConfig\.sigma"),
        ({"transform": {"crop": "center", "short_side": 2**64}}, "short_side"),
        ({"transform": {"crop": "center", "short_side": 10**400}}, "short_side"),
        ({"transform": {"mix": {"num_classes": 10**400}}}, r"MixConfig\.num_classes"),
        ({"transform": {"mix": {"num_classes": 2, "mixup": 1e308}}}, r"MixConfig\.mixup"),
        ({"clip": {"stride": 10**307, "speed": 64}}, r"ClipConfig\.stride"),
        ({"clip": {"fps": 1e-310}}, r"ClipConfig\.fps"),
        ({"seed": 2**64}, r"LoaderConfig\.seed"),
    ],
)
def test_numbers_that_would_fail_later_are_refused_now(values: dict[str, Any], where: str) -> None:
    if "std" in values.get("transform", {}):
        values["transform"]["std"] = (values["transform"]["std"],) * 3
    if "mean" in values.get("transform", {}):
        values["transform"]["mean"] = (values["transform"]["mean"],) * 3
    with pytest.raises(ConfigError, match=where):
        LoaderConfig.parse(values)


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"clip": {"frames": True}}, r"ClipConfig\.frames"),
        ({"clip": {"stride": True}}, r"ClipConfig\.stride"),
        ({"clip": {"fps": True}}, r"ClipConfig\.fps"),
        ({"clip": {"speed": (True, 2)}}, r"ClipConfig\.speed"),
        ({"clip": {"reverse": True}}, r"ClipConfig\.reverse"),
        ({"seed": True}, r"LoaderConfig\.seed"),
        ({"rank": False, "world_size": 2}, r"LoaderConfig\.rank"),
        ({"batch": {"size": True}}, r"BatchConfig\.size"),
        ({"decode": {"cpu_workers": True}}, r"DecodeConfig\.cpu_workers"),
        ({"transform": {"size": (True, 8)}}, r"TransformConfig\.size"),
        ({"transform": {"crop": "center", "short_side": (True, 300)}}, r"TransformConfig\.short_side"),
        ({"transform": {"std": (True, 1, 1)}}, r"TransformConfig\.std"),
        ({"transform": {"erasing": {"value": True}}}, r"ErasingConfig\.value"),
        ({"transform": {"auto_augment": {"num_ops": True}}}, r"AutoAugmentConfig\.num_ops"),
    ],
)
def test_truth_is_no_number(values: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError, match=f"{where}.*: Input should be a number, not true or false"):
        LoaderConfig.parse(values)


def test_truth_is_taken_where_it_is_meant() -> None:
    config = LoaderConfig.parse({"shuffle": False, "clip": {"blend": True}, "cache": {"clips": False}})
    assert (config.shuffle, config.clip.blend, config.cache.clips) == (False, True, "off")


def test_values_of_a_small_dtype_may_be_as_large_as_it_goes() -> None:
    TransformConfig(dtype="float16", std=(2e-5,) * 3, erasing={"value": 65504})  # type: ignore[arg-type]
    TransformConfig(dtype="uint8", std=(1e-6,) * 3, erasing={"value": 255})  # type: ignore[arg-type]
    TransformConfig(dtype="bfloat16", erasing={"value": 1e38})  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(5))
def test_the_extremes_of_moves_and_colours_are_finite(seed: int) -> None:
    config = TransformConfig(
        size=8, affine={"degrees": 360, "scale": (0.01, 0.01), "shear": (89, 89, -89, -89), "translate": (1, 1)},
        color_jitter={"brightness": 999, "contrast": 999, "saturation": 999, "hue": 0.5}, dtype="float32",
    )  # type: ignore[arg-type]  # fmt: skip
    params = draw(config, (40, 50), np.random.default_rng(seed))
    assert params.affine is not None
    assert np.isfinite(params.affine).all()
    assert all(np.isfinite(op.value) for op in params.color)


def test_a_key_that_is_there_twice_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("clip:\n  frames: 4\nseed: 1\nclip:\n  stride: 2\n")
    with pytest.raises(ConfigError, match=r"(?s)run\.yaml: the key 'clip' is there twice.*line 4"):
        LoaderConfig.from_yaml(path)
    path.write_text("base: &base {frames: 4}\nclip: {<<: *base, frames: 5, frames: 6}\n")
    with pytest.raises(ConfigError, match="the key 'frames' is there twice"):
        LoaderConfig.from_yaml(path)
    path.write_text("clip: {<<: {frames: 4}, stride: 2}\n")
    assert LoaderConfig.from_yaml(path).clip == ClipConfig(frames=4, stride=2)
    path.write_text("<<: &all {<<: &some {seed: 1}, seed: 2}\nbatch: 4\n")
    assert LoaderConfig.from_yaml(path) == LoaderConfig.parse({"seed": 2, "batch": 4})


def test_the_bounds_of_a_depth_are_for_one_that_sets_itself(tmp_path: Path) -> None:
    assert (JitterConfig().depth, JitterConfig(depth=6).depth) == ("auto", 6)
    with pytest.raises(ConfigError, match="max_depth is for depth='auto', not for depth=4"):
        JitterConfig(depth=4, max_depth=8)
    with pytest.raises(ConfigError, match="min_depth=20 is above max_depth=16"):
        JitterConfig(min_depth=20)
    for bad in ("deep", 0, 1025, True, 2.5):
        with pytest.raises(ConfigError, match=r"JitterConfig\.depth"):
            JitterConfig(depth=bad)
    LoaderConfig(jitter={"min_depth": 3, "max_depth": 8}).to_yaml(tmp_path / "saved.yaml")
    saved = LoaderConfig.from_yaml(tmp_path / "saved.yaml")
    assert (saved.jitter.depth, saved.jitter.max_depth) == ("auto", 8)
    assert saved.override({"jitter": {"depth": 4}}).jitter.depth == 4, "a number takes the place of the bounds"
    assert saved.override({"jitter": {"max_depth": 9}}).jitter.min_depth == 3

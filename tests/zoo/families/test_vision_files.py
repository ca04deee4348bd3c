"""Checkpoints of images as they are published: names, defaults that files leave out, several models in one file, mistakes."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import zoo
from tests.zoo.families.harness import randomized
from tests.zoo.families.test_vision import CASES, IMAGE, TEXT, TOLERANCE
from tests.zoo.oracle import relative_error
from zoo.checkpoint import CheckpointError
from zoo.components import registry
from zoo.family import family_for
from zoo.towers import tower_config

TOWERS = ("clip_vision_model", "clip_text_model", "siglip_vision_model", "siglip_text_model")
FAMILIES = ("vit", "deit", "dinov2", "dinov2_with_registers", *TOWERS)
HALF = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
MIDDLE = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
GIANT = {"hidden_size": 1536, "num_hidden_layers": 40, "num_attention_heads": 24, "use_swiglu_ffn": True}
IMAGENET = {"id2label": {str(i): f"class {i}" for i in range(1000)}}
CLIP, SIGLIP = {"architectures": ["CLIPModel"], "model_type": "clip"}, {"architectures": ["SiglipModel"], "model_type": "siglip"}
CLIP_B = {**CLIP, "projection_dim": 512, "text_config": {"eos_token_id": 2}, "vision_config": {}}
CLIP_L = {**CLIP, "projection_dim": 768, "text_config": {**MIDDLE, "eos_token_id": 2}, "vision_config": {**LARGE, "patch_size": 14}}
SIGLIP_B = {**SIGLIP, "text_config": {"vocab_size": 32000}, "vision_config": {}}
SIGLIP_H = {**SIGLIP, "text_config": HALF, "vision_config": {**HALF, "image_size": 384, "patch_size": 14}}


def image(kind: str, architecture: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": kind, "architectures": [architecture], **fields}


# Named model -> (config as published, tower, parameters without mask tokens). The two towers of CLIP-B/32 with its logit scale are
# the 151,277,313 parameters of openai/clip-vit-base-patch32, those of SigLIP-B with scale and bias 203,155,970.
PUBLISHED: dict[str, tuple[dict[str, Any], str, int]] = {
    "vit-base-patch16-224": (image("vit", "ViTForImageClassification", **IMAGENET), "", 86_567_656),
    "vit-large-patch16-224": (image("vit", "ViTForImageClassification", **IMAGENET, **LARGE), "", 304_326_632),
    "deit-base-distilled-patch16-224": (image("deit", "DeiTForImageClassificationWithTeacher", **IMAGENET), "", 87_338_192),
    "dinov2-base": (image("dinov2", "Dinov2Model", image_size=518), "", 86_580_480 - 768),
    "dinov2-giant": (image("dinov2", "Dinov2Model", image_size=518, **GIANT), "", 1_136_480_768 - 1536),
    "dinov2-with-registers-base": (
        image("dinov2_with_registers", "Dinov2WithRegistersModel", image_size=518, patch_size=14), "", 86_580_480 - 768 + 4 * 768),
    "clip-vit-base-patch32-vision": (CLIP_B, "vision", 87_849_216),
    "clip-vit-base-patch32-text": (CLIP_B, "text", 151_277_313 - 1 - 87_849_216),
    "clip-vit-large-patch14-vision": (CLIP_L, "vision", 303_966_208),
    "clip-vit-large-patch14-text": (CLIP_L, "text", 427_616_513 - 1 - 303_966_208),
    "siglip-base-patch16-224-vision": (SIGLIP_B, "vision", 92_884_224),
    "siglip-base-patch16-224-text": (SIGLIP_B, "text", 203_155_970 - 2 - 92_884_224),
    "siglip-so400m-patch14-384-vision": (SIGLIP_H, "vision", 428_225_600),
    "siglip-so400m-patch14-384-text": (SIGLIP_H, "text", 449_734_896),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_named_models_are_those_of_the_published_configs(name: str) -> None:
    config, tower, parameters = PUBLISHED[name]
    config = tower_config(config, tower, name) if tower else config
    family, spec = family_for(config, name), zoo.spec(name)
    assert family.read(config) == spec
    assert sum(math.prod(t.shape) for t in spec.parameters().values()) == parameters
    assert family.read(family.write(spec, {})) == spec


@pytest.mark.parametrize("name", FAMILIES)
def test_what_files_leave_out_is_as_in_transformers(name: str) -> None:
    defaults: Any = registry.get("family", name).spec
    config = transformers.AutoConfig.for_model(name)
    assert {word: getattr(config, word) for word in defaults.defaults} == defaults.defaults


@torch.no_grad()
@pytest.mark.parametrize("name", ["clip, image encoder", "clip, text encoder", "siglip, image encoder", "siglip, text encoder",
                                  "dinov2, encoder"])  # fmt: skip
def test_names_with_the_prefix_of_older_files(name: str, tmp_path: Path) -> None:
    """Encoders alone were once saved under the names that they have in the whole model, with a buffer of positions."""
    case = next(c for c in CASES if c.name == name)
    theirs = randomized(getattr(transformers, case.model)(getattr(transformers, case.model).config_class(**case.options)))
    theirs.save_pretrained(tmp_path)
    prefix = "dinov2." if name.startswith("dino") else "text_model." if "text" in name else "vision_model."
    tensors = {f"{prefix}{n}": t for n, t in load_file(tmp_path / "model.safetensors").items()}
    if prefix != "dinov2.":
        tensors[f"{prefix}embeddings.position_ids"] = torch.arange(17)[None]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    x = case.inputs()[0]
    assert relative_error(zoo.load(tmp_path)(x), case.theirs(theirs, x)) < TOLERANCE


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    config = transformers.CLIPConfig(text_config=TEXT, vision_config=IMAGE, projection_dim=24)
    randomized(transformers.CLIPModel(config)).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "CLIPImageProcessor", "size": 16}))
    return folder


def test_several_models_in_one_file(clip: Path) -> None:
    with pytest.raises(CheckpointError, match="describes 2 models; name one, as in REFERENCE#vision or REFERENCE#text"):
        zoo.load(clip)
    with pytest.raises(CheckpointError, match=r"#audio: the checkpoint has no tower 'audio'; it has the towers vision, text"):
        zoo.load(f"{clip}#audio")
    with pytest.raises(CheckpointError, match="nothing is there"):
        zoo.load(f"{clip}/absent#vision")
    assert zoo.spec(f"{clip}#text") == zoo.load(f"{clip}#text").spec
    assert zoo.load(f"{clip}#vision").spec.checkpoint == "clip_vision_model"


@pytest.mark.parametrize(("file", "change", "reference", "wrong"), [
    ("config.json", {"vision_config": "all of it"}, "#vision", "vision_config in config.json must be an object, it is 'all of it'"),
    ("config.json", {"vision_config": {"image_size": 0}}, "#vision", "must be at least 1"),
    ("config.json", {"architectures": ["CLIPForImageClassification"], "vision_config": {"num_hidden_layers": 10**12}}, "",
     "num_hidden_layers is 1000000000000"),
    ("preprocessor_config.json", ["no object"], "#text", "preprocessor_config.json must hold a JSON object"),
])  # fmt: skip
def test_damaged_settings_are_named(clip: Path, tmp_path: Path, file: str, change: Any, reference: str, wrong: str) -> None:
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes((clip / name).read_bytes())
    old = json.loads((clip / file).read_text())
    (tmp_path / file).write_text(json.dumps({**old, **change} if isinstance(change, dict) else change))
    with pytest.raises(ValueError, match=wrong):
        zoo.load(f"{tmp_path}{reference}")


def test_a_model_alone_has_no_towers(tmp_path: Path) -> None:
    transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**IMAGE)).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="no tower 'vision'; it holds one model; leave out what follows the #"):
        zoo.load(f"{tmp_path}#vision")


def test_a_tower_of_a_folder_here(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(clip.parent)
    assert zoo.spec(f"{clip.name}#text") == zoo.load(f"{clip.name}#text").spec


def test_a_hash_in_a_folder_name_is_no_tower(clip: Path, tmp_path: Path) -> None:
    (tmp_path / "a#b").symlink_to(clip)
    assert zoo.load(f"{tmp_path}/a#b#vision").spec.width == 32
    with pytest.raises(CheckpointError, match="describes 2 models"):
        zoo.load(tmp_path / "a#b")


def test_a_wrong_tower_of_the_file_is_an_error(clip: Path, tmp_path: Path) -> None:
    """Tensors of the other tower are expected; one that belongs to neither is not."""
    tensors = load_file(clip / "model.safetensors") | {"audio_model.weight": torch.zeros(1)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((clip / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"1 unexpected: audio_model\.weight"):
        zoo.load(f"{tmp_path}#text")


@torch.no_grad()
def test_towers_meet_in_one_space(clip: Path) -> None:
    """Cosine similarities of images and texts, as CLIPModel gives them before its logit scale."""
    theirs = transformers.CLIPModel.from_pretrained(clip).eval()
    pixels, ids = torch.randn(3, 3, 16, 16), torch.randint(3, 96, (4, 12))
    ids[:, -1] = 96
    image, text = (zoo.load(f"{clip}#{tower}", override=["head.normalize=true"]) for tower in ("vision", "text"))
    scale = theirs.logit_scale.exp()
    want = theirs(input_ids=ids, pixel_values=pixels).logits_per_image / scale
    assert relative_error(image(pixels) @ text(ids).T, want) < TOLERANCE


@torch.no_grad()
def test_texts_of_unequal_length(clip: Path) -> None:
    """What follows a text's end changes nothing, whether it is called padding or not."""
    theirs, ours = transformers.CLIPModel.from_pretrained(clip).eval(), zoo.load(f"{clip}#text")
    ids, lengths = torch.randint(3, 96, (3, 12)), [12, 4, 7]
    for row, n in enumerate(lengths):
        ids[row, n - 1 :] = 96
    want = theirs.get_text_features(input_ids=ids).pooler_output
    assert relative_error(ours(ids), want) < TOLERANCE
    assert relative_error(ours(ids, lengths=lengths), want) < TOLERANCE


@pytest.mark.parametrize("model", ["SiglipVisionModel", "CLIPVisionModel", "ViTForImageClassification", "Dinov2Model"])
@torch.no_grad()
def test_images_that_are_no_multiple_of_the_patch(model: str, tmp_path: Path) -> None:
    """As SigLIP's of 384 pixels in patches of 14: what is left over is not seen; the size stays as it is written."""
    kind = getattr(transformers, model)
    config = kind.config_class(**{**IMAGE, "image_size": 19, "mlp_ratio": 2})
    theirs = randomized(kind(config))
    theirs.save_pretrained(tmp_path / "theirs")
    ours, x = zoo.load(tmp_path / "theirs"), torch.randn(2, 3, 19, 19)
    result = theirs(x)
    want = result.logits if "logits" in result else result.pooler_output
    assert relative_error(ours(x), want) < TOLERANCE
    assert zoo.save(ours, tmp_path / "ours").transformers is None
    assert json.loads((tmp_path / "ours/config.json").read_text())["image_size"] == 19


@torch.no_grad()
def test_another_grid_changes_the_size_of_images() -> None:
    family: Any = registry.get("family", "siglip_vision_model").spec()
    config = {**IMAGE, "model_type": "siglip_vision_model", "image_size": 19}
    larger = zoo.spec(family.read(config), "embed.position.rows=5", "embed.position.columns=5")
    assert family.write(dataclasses.replace(larger, context=25), config)["image_size"] == 20


@pytest.mark.parametrize("head", ["", "head=hidden"])
@torch.no_grad()
def test_a_pooler_that_a_head_does_not_use(head: str, tmp_path: Path) -> None:
    """Files of ViT's first releases have one beside the classifier."""
    theirs = randomized(transformers.ViTForImageClassification(transformers.ViTConfig(**IMAGE)))
    theirs.save_pretrained(tmp_path)
    more = {"vit.pooler.dense.weight": torch.ones(32, 32), "vit.pooler.dense.bias": torch.ones(32)}
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    save_file(stored | more if not head else {n: t for n, t in (stored | more).items() if "classifier" not in n}, file)
    x = torch.randn(2, 3, 16, 16)
    want = theirs.vit(x).last_hidden_state if head else theirs(x).logits
    assert relative_error(zoo.load(tmp_path, override=[head] if head else [])(x), want) < TOLERANCE


@torch.no_grad()
def test_an_encoder_without_pooler_gives_what_is_asked_of_it(tmp_path: Path) -> None:
    """As DINO's files are: config.json does not say that there is none."""
    theirs = randomized(transformers.ViTModel(transformers.ViTConfig(**IMAGE), add_pooling_layer=False))
    theirs.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"2 missing: pooler\.dense\.bias, pooler\.dense\.weight"):
        zoo.load(tmp_path)
    x = torch.randn(2, 3, 16, 16)
    want = theirs(x).last_hidden_state
    assert relative_error(zoo.load(tmp_path, override=["head=hidden"])(x), want) < TOLERANCE
    assert relative_error(zoo.load(tmp_path, override=["head={name: pooling, pool: first}"])(x), want[:, 0]) < TOLERANCE


@pytest.mark.parametrize(("edit", "lost"), [
    ("layers.*.norm=rms", "the config can only say norm layer, the model has rms"),
    ("layers.*.mixer.position=rope_axial", "position is rope_axial"),
    ("layers.*.mixer.pattern=causal", "pattern is causal"),
    ("layers.1.mlp.hidden=24", "hidden is 24 where it can only say 48"),
    ("embed.position.antialias=true", "antialias is True"),
])  # fmt: skip
def test_what_a_config_cannot_say_is_not_written_as_if_it_could(edit: str, lost: str) -> None:
    family, config = registry.get("family", "vit").spec(), image("vit", "ViTForImageClassification", **IMAGE)
    spec = zoo.spec(family.read(config), edit)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match=lost):
        family.write(spec, config)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(("fields", "wrong"), [
    ({"hidden_act": "mish"}, "hidden_act 'mish' is not supported; supported: silu"),
    ({"patch_size": [4, 8]}, r"patch_size \[4, 8\] is not supported: the sides must be equal"),
])  # fmt: skip
def test_configs_that_are_not_supported_are_named(fields: dict[str, Any], wrong: str) -> None:
    family: Any = registry.get("family", "vit").spec()
    with pytest.raises(ValueError, match=wrong):
        family.read({**IMAGE, **fields})

"""Every recipe in the repository loads, says what to expect, and prints as itself."""

from pathlib import Path

import pytest

from mpp.classify_recipe import ClassifyConfig
from mpp.config import dump_recipe, help_text, load_recipe
from mpp.evaluate import EvaluateConfig
from mpp.heads import LinearHead
from mpp.ladder import LadderConfig
from mpp.pretrain import PretrainConfig

RECIPES = Path(__file__).parent.parent / "recipes"
KINDS = {
    "recipes": PretrainConfig,
    "pretrain": PretrainConfig,
    "finetune": ClassifyConfig,
    "supervised": ClassifyConfig,
    "evaluate": EvaluateConfig,
    "ladder": LadderConfig,
}
RUNNABLE = sorted(path for path in RECIPES.rglob("*.yaml") if path.parent.name != "common")


@pytest.mark.parametrize("path", RUNNABLE, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_recipes_load_and_the_stored_recipe_is_the_same(path, tmp_path):
    kind = KINDS[path.parent.name]
    recipe = load_recipe(kind, [str(path)])
    stored = tmp_path / "recipe.yaml"
    stored.write_text(dump_recipe(recipe))
    assert load_recipe(kind, [str(stored)]) == recipe


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.yaml")), ids=lambda path: path.stem)
def test_headers_give_the_command_and_what_to_expect(path):
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert any(line.startswith("# Expect: ") for line in header)
    commands = ("#   accelerate launch tools/", "#   python tools/")
    assert path.parent.name == "common" or any(line.startswith(commands) for line in header)


def test_the_paper_recipe_says_what_the_paper_says():
    recipe = load_recipe(PretrainConfig, [str(RECIPES / "pretrain" / "vit_b16_imagenet.yaml")])
    assert recipe.backbone.shape() == (768, 12, 12)
    assert (recipe.masking.ratio, recipe.corruption.mask_token, recipe.corruption.random_patch) == (0.5, 0.8, 0.1)
    assert (recipe.target.kind, recipe.target.bits) == ("mean_color", 3)
    assert (recipe.optim.lr, recipe.optim.warmup_steps, recipe.optim.schedule) == (2e-4, 10_000, "cosine")
    assert (recipe.train.batch_size, recipe.train.steps) == (4096, 100_000)
    assert recipe.masking.num_corrupted((14, 14)) == 98


def test_the_fine_tuning_recipes_say_what_the_paper_says():
    recipe = load_recipe(ClassifyConfig, [str(RECIPES / "finetune" / "imagenet_384.yaml")])
    optim = recipe.optim
    assert (optim.kind, optim.momentum, optim.nesterov, optim.weight_decay, optim.clip) == ("sgd", 0.9, False, 0, 1)
    assert (optim.warmup_steps, optim.schedule) == (500, "cosine")
    assert (recipe.train.steps, recipe.train.batch_size) == (20_000, 512)
    assert recipe.head == LinearHead() and recipe.backbone.image_size == 384 and recipe.view.crop == 0.875
    large = load_recipe(ClassifyConfig, [str(RECIPES / "finetune" / "imagenet_512.yaml")])
    assert large.averaging.decay == 0.9999 and large.backbone.image_size == 512
    supervised = load_recipe(ClassifyConfig, [str(RECIPES / "supervised" / "imagenet21k_vit_b16.yaml")])
    assert (supervised.loss.kind, supervised.head.kind, supervised.head.bias) == ("sigmoid", "mlp", -10)
    assert (supervised.optim.lr, supervised.optim.final_lr, supervised.optim.schedule) == (1e-3, 1e-5, "linear")
    mae = load_recipe(ClassifyConfig, [str(RECIPES / "finetune" / "imagenet_mae_style.yaml")])
    assert mae.optim.lr == 5e-4 * mae.train.batch_size / 256 and mae.optim.layer_decay == 0.65


@pytest.mark.parametrize("kind", [PretrainConfig, ClassifyConfig, EvaluateConfig, LadderConfig])
def test_help_is_a_recipe(kind, tmp_path):
    """What --help prints can be saved and run: it is the default recipe."""
    text = help_text(kind)
    path = tmp_path / "help.yaml"
    path.write_text(text)
    assert load_recipe(kind, [str(path)]) == kind()

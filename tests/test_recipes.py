"""Every recipe in the repository loads, says what to expect, and prints as itself."""

from pathlib import Path

import pytest

from mpp.config import dump_recipe, help_text, load_recipe
from mpp.pretrain import PretrainConfig

RECIPES = Path(__file__).parent.parent / "recipes"
RUNNABLE = sorted([RECIPES / "quickstart.yaml", *(RECIPES / "pretrain").glob("*.yaml")])


@pytest.mark.parametrize("path", RUNNABLE, ids=lambda path: path.stem)
def test_recipes_load_and_the_stored_recipe_is_the_same(path, tmp_path):
    recipe = load_recipe(PretrainConfig, [str(path)])
    stored = tmp_path / "recipe.yaml"
    stored.write_text(dump_recipe(recipe))
    assert load_recipe(PretrainConfig, [str(stored)]) == recipe


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.yaml")), ids=lambda path: path.stem)
def test_headers_give_the_command_and_what_to_expect(path):
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert any(line.startswith("# Expect: ") for line in header)
    assert path.parent.name == "common" or any("accelerate launch" in line for line in header)


def test_the_paper_recipe_says_what_the_paper_says():
    recipe = load_recipe(PretrainConfig, [str(RECIPES / "pretrain" / "vit_b16_imagenet.yaml")])
    assert recipe.backbone.shape() == (768, 12, 12)
    assert (recipe.masking.ratio, recipe.corruption.mask_token, recipe.corruption.random_patch) == (0.5, 0.8, 0.1)
    assert (recipe.target.kind, recipe.target.bits) == ("mean_color", 3)
    assert (recipe.optim.lr, recipe.optim.warmup_steps, recipe.optim.schedule) == (2e-4, 10_000, "cosine")
    assert (recipe.train.batch_size, recipe.train.steps) == (4096, 100_000)
    assert recipe.masking.num_corrupted((14, 14)) == 98


def test_help_is_a_recipe(tmp_path):
    """What --help prints can be saved and run: it is the default recipe."""
    text = help_text(PretrainConfig)
    path = tmp_path / "help.yaml"
    path.write_text(text)
    assert load_recipe(PretrainConfig, [str(path)]) == PretrainConfig()

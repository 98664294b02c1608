"""A trained model in use: the files a run leaves, predict, evaluate, export."""

import csv
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from amptrain.checkpoint.store import CheckpointStore, read
from amptrain.cli import main
from amptrain.errors import ConfigError, TrainingError
from amptrain.inference.export import compare
from amptrain.inference.model_file import (
    BEST,
    LAST,
    find_model,
    load_model,
    read_info,
    read_tensors,
)
from PIL import Image
from safetensors.torch import load_file

COLOURS = {"blue": 2, "green": 1, "sea é": 0}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on three classes that differ in colour, with averaged weights."""
    root = tmp_path_factory.mktemp("use")
    rng = np.random.default_rng(0)
    for part, count in (("train", 12), ("val", 4)):
        for name, channel in COLOURS.items():
            folder = root / "photos" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 90, (24, 30, 3), dtype=np.uint8)
                pixels[..., channel] += 120
                Image.fromarray(pixels).save(folder / f"{number}.png")
    flags = (
        "--device cpu --model small_cnn --image-size 16 --batch-size 12 --epochs 4 --num-workers 0"
    )
    more = ["--ema-decay", "0.5", "--name", "run", "--runs", str(root), "--precision", "fp32"]
    assert main(["train", *flags.split(), *more, "--data", f"imagefolder:{root}/photos"]) == 0
    return root / "run"


def test_a_run_leaves_its_judged_weights_with_all_one_has_to_know(run: Path) -> None:
    info = read_info(run / LAST)
    assert (info.classes, info.shape) == (("blue", "green", "sea é"), (3, 16, 16))
    assert (info.averaged, info.epoch) == (True, 4)
    assert info.versions["torch"] == torch.__version__
    assert info.metrics["accuracy"] == json.loads((run / "result.json").read_text())["accuracy"]
    newest = CheckpointStore(run / "checkpoints").load_latest()
    assert newest is not None
    for name, tensor in load_file(run / LAST).items():
        assert torch.equal(tensor, newest.state["ema"][name])  # type: ignore[index]


def test_the_model_is_as_open_to_others_as_the_rest_of_the_run(run: Path) -> None:
    modes = {name: (run / name).stat().st_mode for name in (LAST, BEST, "config.yaml")}
    assert len(set(modes.values())) == 1, modes


def test_a_run_is_found_by_its_name_beside_a_folder_of_that_name(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`amptrain evaluate photos`, where the images lie in photos/ and the run in runs/photos/."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/photos").symlink_to(run)
    monkeypatch.chdir(tmp_path)
    assert find_model(Path("photos")) == Path("runs/photos") / BEST


def test_the_best_epoch_is_kept_beside_the_newest(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    epochs = [line for line in lines if line["kind"] == "epoch"]
    best = max(epochs, key=lambda line: line["val_accuracy"])
    assert read_info(run / BEST).step == best["step"]
    assert read(run / "checkpoints" / "best.pt")["step"] == best["step"]
    assert find_model(run) == run / BEST


def predicted(text: str) -> dict[str, str]:
    return {row["image"]: row["class"] for row in csv.DictReader(io.StringIO(text))}


def test_predict_names_the_class_of_a_folder_a_file_and_a_list(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run.parent / "photos" / "val"
    capsys.readouterr()
    assert main(["predict", str(run), str(folder), "--top", "2"]) == 0
    told = capsys.readouterr()
    answers = predicted(told.out)
    assert len(answers) == 12
    assert all(name == Path(path).parent.name for path, name in answers.items())
    assert "probability_2" in told.out
    assert "accuracy 100.00% in validation" in told.err
    one = str(folder / "green" / "0.png")
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{one}\n"))
    assert main(["predict", str(run / BEST), "-"]) == 0
    assert predicted(capsys.readouterr().out) == {one: "green"}
    out = run / "answers.json"
    assert main(["predict", str(run), one, "--out", str(out)]) == 0
    (answer,) = json.loads(out.read_text())
    assert (answer["image"], answer["predictions"][0]["class"]) == (one, "green")


def test_predict_goes_on_after_a_broken_image_and_ends_with_1(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.png").write_bytes(b"nothing")
    Image.new("RGB", (20, 20), (0, 0, 200)).save(tmp_path / "b.png")
    assert main(["predict", str(run), str(tmp_path)]) == 1
    told = capsys.readouterr()
    rows = list(csv.DictReader(io.StringIO(told.out)))
    assert "cannot identify" in rows[0]["error"]
    assert rows[1]["class"] == "blue"
    assert "1 image could not be read" in told.err


def test_what_is_not_there_has_a_row_of_its_own(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "empty").mkdir()
    one = str(run.parent / "photos" / "val" / "green" / "0.png")
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{tmp_path}/gone.png\r\n\r\n{one}\r\n"))
    out = tmp_path / "new" / "answers.json"
    assert main(["predict", str(run), "-", str(tmp_path / "empty"), "--out", str(out)]) == 1
    gone, there, empty = json.loads(out.read_text())
    assert gone["error"] == "there is no such file"
    assert there["predictions"][0]["class"] == "green"
    assert empty == {"image": f"{tmp_path}/empty", "error": "there is no image in this folder"}
    assert "2 images could not be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["predict", "nowhere", "a.png"], "There is no file and no run nowhere"),
        (["predict", "RUN", "nowhere.png"], "There is no file and no folder nowhere.png"),
        (["predict", "RUN"], "Which images?"),
        (["predict", "RUN", ".", "--out", "a.xlsx"], "its ending needs to be .csv or .json"),
        (["export", "RUN"], "Which format?"),
        (["evaluate", "RUN", "--data", "digits"], "knows 3 classes and digits has 10"),
    ],
)
def test_what_cannot_be_is_told(
    run: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run) if word == "RUN" else word for word in words]) == 2
    assert sentence in capsys.readouterr().err


def test_evaluate_counts_each_image_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = f"imagefolder:{run.parent}/photos"
    assert main(["evaluate", str(run), "--data", data]) == 0
    folder = run / "evaluation"
    values = json.loads((folder / "evaluation.json").read_text())
    assert (values["images"], values["top1"], values["top5"]) == (12, 1.0, 1.0)
    assert values["loss"] == pytest.approx(read_info(run / BEST).metrics["loss"], rel=1e-4)
    assert values["per_class"]["sea é"] == {"images": 4, "precision": 1, "recall": 1, "f1": 1}
    rows = list(csv.reader((folder / "confusion.csv").open(encoding="utf-8")))
    assert [row[1:] for row in rows[1:]] == [["4", "0", "0"], ["0", "4", "0"], ["0", "0", "4"]]
    with Image.open(folder / "confusion.png") as picture:
        assert len(picture.convert("RGB").getcolors(2**24) or []) > 10  # not an empty sheet
    assert "top-1 100.00%" in capsys.readouterr().out


def test_evaluate_holds_out_the_images_that_the_run_held_out(run: Path, tmp_path: Path) -> None:
    """Others are images it was trained on. Data with a part for validation is judged on that."""
    photos = run.parent / "photos"
    flags = (
        "--device cpu --model small_cnn --image-size 16 --batch-size 6 --epochs 2 --num-workers 0 "
        "--precision fp32 --no-augment --seed 3 --val-fraction 0.4 --name split"
    )
    data = ["--data", f"imagefolder:{photos}/train"]
    assert main(["train", *flags.split(), "--runs", str(tmp_path), *data]) == 0
    evaluate = ["evaluate", str(tmp_path / "split" / LAST), "--out", str(tmp_path), "--device=cpu"]
    assert main([*evaluate, *data]) == 0
    judged = json.loads((tmp_path / "evaluation.json").read_text())
    in_training = read_info(tmp_path / "split" / LAST).metrics
    assert judged["loss"] == pytest.approx(in_training["loss"], rel=1e-4)
    assert main([*evaluate, "--data", f"imagefolder:{photos}"]) == 0
    assert json.loads((tmp_path / "evaluation.json").read_text())["images"] == 12


def test_images_are_read_as_in_training(tmp_path: Path, capsys) -> None:
    """12 bits in 16: without the white level all of them are nearly black."""
    rng = np.random.default_rng(0)
    for name, level in (("bright", 2500), ("dark", 400)):
        (tmp_path / "cells" / name).mkdir(parents=True)
        for number in range(10):
            pixels = level + rng.integers(0, 900, (20, 20), dtype=np.uint16)
            Image.fromarray(pixels).save(tmp_path / "cells" / name / f"{number}.png")
    flags = (
        "--device cpu --model small_cnn --image-size 16 --batch-size 8 --epochs 6 --num-workers 0 "
        "--precision fp32 --no-augment --name run --white-level 4095"
    )
    data = ["--data", f"imagefolder:{tmp_path}/cells"]
    assert main(["train", *flags.split(), "--runs", str(tmp_path), *data]) == 0
    model = str(tmp_path / "run" / LAST)
    assert main(["evaluate", model, "--out", str(tmp_path), "--device=cpu", *data]) == 0
    judged = json.loads((tmp_path / "evaluation.json").read_text())
    assert judged["loss"] == pytest.approx(read_info(Path(model)).metrics["loss"], rel=1e-4)
    capsys.readouterr()
    assert main(["predict", model, str(tmp_path / "cells")]) == 0
    answers = predicted(capsys.readouterr().out)
    assert all(name == Path(path).parent.name for path, name in answers.items())


@pytest.mark.parametrize("ending", [".safetensors", ".pt2", ".onnx"])
def test_an_exported_model_computes_the_same(run: Path, tmp_path: Path, ending: str) -> None:
    out = tmp_path / f"model{ending}"
    assert main(["export", str(run), "--out", str(out)]) == 0
    model, info, _ = load_model(run)
    if ending == ".pt2":
        extra = {"amptrain": ""}
        program = torch.export.load(out, extra_files=extra)
        images = torch.randn(5, *info.shape)
        torch.testing.assert_close(program.module()(images), model(images))
        assert json.loads(extra["amptrain"])["classes"] == list(info.classes)
    elif ending == ".safetensors":
        assert read_info(out) == info
        assert all(torch.equal(t, model.state_dict()[n]) for n, t in read_tensors(out).items())


def test_a_model_is_exported_after_a_deterministic_run(run: Path, tmp_path: Path) -> None:
    """As in a notebook: the setting stays on, and small_cnn then pools another way."""
    torch.use_deterministic_algorithms(True)
    try:
        assert main(["export", str(run), "--out", str(tmp_path / "model.onnx")]) == 0
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_export_that_computes_something_else_is_refused(run: Path) -> None:
    model, info, _ = load_model(run)
    with pytest.raises(TrainingError, match="does not compute the same"):
        compare(model, lambda images: model(images) * 1.01, info)
    with pytest.raises(TrainingError, match="gives"):
        compare(model, lambda images: model(images)[:1], info)


def test_weights_of_another_program_are_told_to_be_no_model(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match="amptrain did not write it"):
        read_info(tmp_path / "other.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_info(tmp_path / "cut.safetensors")

"""JupyterLab and Notebook 7 in a real Chromium, as a person uses them. Screenshots go to
.build/screenshots."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, FrameLocator, Locator, Page, expect, sync_playwright

from entrypoints.environment import PERSONAL
from tests.container.test_jupyter import ARTICLE
from tests.support import ROOT, Container, free_port, started, wait_until

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox",  # Chromium's own refuses to work for root; what is opened here is ours
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SCREENSHOTS = ROOT / ".build/screenshots"
QUICKSTART = "notebooks/amp_quickstart.ipynb"
CURVE = """
from torch.utils.tensorboard import SummaryWriter
with SummaryWriter("/workspace/runs/seen-in-the-browser") as writer:
    for step in range(50):
        writer.add_scalar("loss/train", 2 / (step + 1), step)
"""
PATIENCE_MS = 60_000
TRAINING_MS = 180_000
COLOURS = """image => {
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
    const context = canvas.getContext("2d");
    context.drawImage(image, 0, 0);
    const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
    const pixels = new Uint32Array(data.buffer);
    return new Set(pixels).size;
}"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    """A page of a browser that was never here."""
    context = chromium.new_context(viewport={"width": 1400, "height": 1000})
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    yield page
    context.close()


@contextmanager
def serving(*command: str, options: tuple[str, ...] = ()) -> Iterator[Container]:
    """`started`, published at the port that the printed link names; ready when the block begins."""
    port = free_port()
    publish = (f"--publish=127.0.0.1:{port}:8888", f"--env=JUPYTER_PORT={port}", "--shm-size=1g")
    with started(
        *command, options=(*publish, *options), announced=["Invalid credentials", "wrote error"]
    ) as container:
        wait_until(lambda: container.health() == "healthy", "a healthy Jupyter")
        yield container


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the workspace, of another owner, with two more notebooks."""
    folder = tmp_path_factory.mktemp("browser") / "workspace"
    shutil.copytree(
        ROOT / "workspace", folder, ignore=shutil.ignore_patterns("runs", "__pycache__")
    )
    draw = "import matplotlib.pyplot as plt\nplt.plot([3, 1, 2])\nplt.title('three points');"
    write_notebook(folder / "plot.ipynb", draw)
    # The very lines of TensorBoard's own guide.
    watch = "%load_ext tensorboard\n%tensorboard --logdir runs"
    write_notebook(folder / "tensorboard.ipynb", watch)
    subprocess.run(["chown", "-R", "12345:12345", str(folder)], check=True)
    return folder


def write_notebook(file: Path, source: str) -> None:
    """A notebook of one cell."""
    cell = {
        "cell_type": "code",
        "id": "plot",
        "metadata": {},
        "source": source,
        "outputs": [],
        "execution_count": None,
    }
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    notebook = {
        "cells": [cell],
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    file.write_text(json.dumps(notebook))


@pytest.fixture(scope="module")
def lab(workspace: Path) -> Iterator[Container]:
    with serving("jupyter", options=(f"--volume={workspace}:/workspace",)) as container:
        yield container


@pytest.fixture(scope="module")
def notebook() -> Iterator[Container]:
    """What the article's command line starts, on the image's own workspace."""
    with serving(*ARTICLE) as container:
        yield container


def printed_link(container: Container) -> str:
    """What the log tells a person to click."""
    return container.wait_for_log(r"^Jupyter: (http://127\.0\.0\.1:\d+/\S+\?token=\w{48})$")[1]


def opened(container: Container, page: Page, path: str) -> None:
    """Log in by the printed link, then open a notebook and wait for its kernel."""
    link = printed_link(container)
    page.goto(
        f"{link}&reset"
    )  # without what the browser before left open: Lab keeps that on the server
    expect(page.locator(".jp-Launcher").first).to_be_visible()
    page.goto(f"{link.partition('/lab')[0]}/lab/tree/{path}?reset")
    expect(page.locator(".jp-Notebook .jp-CodeCell").first).to_be_visible()
    expect(page.locator(".jp-KernelName").first).to_contain_text("Python 3")
    expect(page.locator(".jp-Notebook-ExecutionIndicator")).to_have_attribute("data-status", "idle")


def run_all(page: Page) -> None:
    """Menu Run, Run All Cells."""
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()


def plots(page: Page) -> Locator:
    """Images that cells have drawn."""
    return page.locator(".jp-OutputArea-output img")


def screenshot(page: Page, name: str) -> None:
    """Keep what the person would see."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png")


def assert_is_drawn(image: Locator) -> None:
    """The image has a size, and more than a blank area in it."""
    image.scroll_into_view_if_needed()
    box = image.bounding_box()
    assert box
    assert box["width"] > 100
    assert box["height"] > 100
    assert image.evaluate(COLOURS) > 10


def test_without_the_token_there_is_only_the_login_page(lab: Container, page: Page) -> None:
    page.goto(printed_link(lab).partition("?")[0])
    field = page.get_by_label("Password or token:")
    expect(field).to_be_visible()
    assert "/login" in page.url
    assert page.locator(".jp-LabShell").count() == 0
    screenshot(page, "login")
    field.fill("wrong")
    field.press("Enter")
    expect(page.get_by_text("Invalid credentials")).to_be_visible()


def test_printed_link_opens_the_lab_and_nothing_pops_up(lab: Container, page: Page) -> None:
    page.goto(printed_link(lab))
    expect(page.locator(".jp-Launcher").first).to_be_visible()
    expect(page.locator(".jp-DirListing-item", has_text="train_amp.py")).to_be_visible()
    page.wait_for_timeout(1000)
    screenshot(page, "lab")
    assert page.locator(".jp-Dialog, .jp-toast, .Toastify__toast").all_inner_texts() == []


def test_notebook_draws_a_plot(lab: Container, page: Page) -> None:
    opened(lab, page, "plot.ipynb")
    run_all(page)
    expect(plots(page)).to_have_count(1)
    assert_is_drawn(plots(page).first)
    screenshot(page, "plot")


def test_quickstart_trains_and_shows_its_curve(lab: Container, page: Page) -> None:
    opened(lab, page, QUICKSTART)
    run_all(page)
    expect(page.locator(".jp-Notebook-ExecutionIndicator")).to_have_attribute("data-status", "busy")
    expect(page.locator(".jp-Notebook-ExecutionIndicator")).to_have_attribute(
        "data-status", "idle", timeout=TRAINING_MS
    )
    expect(plots(page).first).to_be_visible()
    assert page.locator("[data-mime-type='application/vnd.jupyter.error']").all_inner_texts() == []
    assert page.locator("[data-mime-type='application/vnd.jupyter.stderr']").all_inner_texts() == []
    for image in plots(page).all():
        assert_is_drawn(image)
    screenshot(page, "quickstart")


def test_terminal_sees_what_docker_exec_sees(lab: Container, page: Page, workspace: Path) -> None:
    page.goto(printed_link(lab) + "&reset")
    page.locator(".jp-LauncherCard", has_text="Terminal").click()
    expect(page.locator(".jp-Terminal .xterm-screen")).to_be_visible()
    page.locator(".jp-Terminal .xterm-screen").click()
    page.keyboard.type(
        "cd; command -v python; env -0 > /workspace/env.part; mv "
        "/workspace/env.part /workspace/env\n"
    )
    made = workspace / "env"
    wait_until(made.exists, "what the terminal's command writes")
    screenshot(page, "terminal")
    terminal = variables(made.read_text())
    executed = variables(lab.execute("bash", "-lc", "env -0", user="dev"))
    shared = executed.keys() - PERSONAL
    assert {"PATH", "VIRTUAL_ENV", "PIP_CONSTRAINT", "PYTORCH_VERSION"} <= shared
    assert {name: terminal.get(name) for name in shared} == {
        name: executed[name] for name in shared
    }
    token = printed_link(lab).partition("token=")[2]
    assert [name for name, value in terminal.items() if token in value] == []


def variables(text: str) -> dict[str, str]:
    """The output of `env -0`."""
    return dict(line.split("=", 1) for line in text.split("\0") if line)


@pytest.fixture(scope="module")
def curves(lab: Container) -> None:
    """A run for TensorBoard to show."""
    lab.execute("python", "-c", CURVE, user="dev")


def assert_shows_the_curve(board: Page | FrameLocator) -> None:
    """TensorBoard's page has the run, its scalar and a line."""
    expect(board.get_by_text("loss/train").first).to_be_visible()
    expect(board.get_by_text("seen-in-the-browser").first).to_be_visible()


@pytest.mark.usefixtures("curves")
def test_tensorboard_s_tile_shows_curves(lab: Container, page: Page) -> None:
    page.goto(printed_link(lab) + "&reset")
    with page.context.expect_page() as opening:
        page.locator(".jp-LauncherCard", has_text="TensorBoard").click()
    board = opening.value
    board.set_viewport_size({"width": 1400, "height": 1000})
    assert_shows_the_curve(board)
    board.wait_for_timeout(1000)  # the line is drawn after its frame
    screenshot(board, "tensorboard-tile")


@pytest.mark.usefixtures("curves")
def test_tensorboard_s_magic_shows_curves_in_the_notebook(lab: Container, page: Page) -> None:
    opened(lab, page, "tensorboard.ipynb")
    run_all(page)
    assert_shows_the_curve(page.frame_locator(".jp-OutputArea-output iframe"))
    screenshot(page, "tensorboard-magic")


def test_article_s_command_shows_notebook_7(notebook: Container, page: Page) -> None:
    page.goto(printed_link(notebook))
    assert "/tree" in page.url
    expect(page.get_by_text("train_amp.py")).to_be_visible()
    expect(page.locator("#jp-NotebookLogo")).to_be_visible()
    assert page.locator(".jp-LabShell").count() == 0
    screenshot(page, "notebook")

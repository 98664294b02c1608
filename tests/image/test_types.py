"""mypy --strict on the training package, against the very torch it runs with (so in the image's
test stage)."""

from tests.support import ROOT, TEST_IMAGE, run_once


def test_amptrain_is_typed() -> None:
    done = run_once(
        *(
            "mypy",
            "--cache-dir=/tmp/mypy",
            "--config-file=/source/pyproject.toml",
            "--python-version=3.13",
        ),
        *("amptrain", "train_amp.py", "examples"),
        options=(
            f"--volume={ROOT}:/source:ro",
            "--workdir=/source/workspace",
            "--network=none",
            "--user=root",
        ),
        image=TEST_IMAGE,
        timeout_s=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr

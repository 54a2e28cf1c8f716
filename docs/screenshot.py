"""Makes docs/report.png, the picture in the README: the report of the first run of `make demo`.

    python docs/screenshot.py [--run runs/20261115-205543-equal] [--out docs/report.png]

Without --run it trains first. Needs chromium or Google Chrome.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_DEMO = (
    "--workers 4 --speed 0.5,0.5,0.5,0.125 --batch 256 --epochs 8 --optimizer adamw --lr 0.002 "
    "--shares equal --name equal"
)
# The report shows the command as it was typed, without the folder of this installation.
_ECHELON = "import sys; sys.argv[0] = 'echelon'; from echelon.cli import main; main()"


def main() -> None:
    """Train if need be, write the report, and let the browser draw it."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--run", help="a run's folder; default: train the demo")
    options.add_argument("--out", default=str(Path(__file__).parent / "report.png"))
    options.add_argument("--size", default="960,810", help="the picture's width and height")
    given = options.parse_args()
    browser = next((found for name in _BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        sys.exit(f"none of {', '.join(_BROWSERS)} is installed")
    with tempfile.TemporaryDirectory() as folder:
        echelon = [sys.executable, "-c", _ECHELON]
        page = Path(folder) / "report.html"
        if given.run is None:
            subprocess.run([*echelon, "train", *_DEMO.split()], check=True, cwd=folder)
        where = [str(Path(given.run).absolute())] if given.run else []
        subprocess.run([*echelon, "report", *where, "--out", str(page)], check=True, cwd=folder)
        command = [
            browser,
            "--headless",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/browser",
        ]
        if os.geteuid() == 0:
            command.append("--no-sandbox")  # chromium refuses to run as root with its sandbox
        target = Path(given.out).absolute()
        command += [f"--screenshot={target}", f"--window-size={given.size}", page.as_uri()]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    size = target.stat().st_size
    print(f"{target}: {size / 1000:.0f} kB")  # noqa: T201 - a script, not the library
    if size > 200_000:
        sys.exit("larger than 200 kB: make --size smaller")


if __name__ == "__main__":
    main()

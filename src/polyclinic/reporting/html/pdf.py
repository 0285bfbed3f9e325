"""Prints the page to PDF with a headless Chromium."""

import shutil
import subprocess
import tempfile
from pathlib import Path

from polyclinic.core import EngineError, StoreError
from polyclinic.storage.files import write_atomically

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
PATIENCE = 120.0


def find_browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        raise EngineError(
            "--pdf prints with Chromium, and there is none here; install it (Debian: apt-get install chromium), or "
            "open the HTML file in any browser and print it"
        )
    return found


def write_pdf(source: Path, target: Path) -> None:
    """Print an HTML file; a reader of `target` sees the old file or the new one."""
    program = find_browser()
    with tempfile.TemporaryDirectory(prefix="polyclinic-pdf-") as place:
        printed = Path(place) / "page.pdf"
        command = [program, "--headless", "--disable-gpu", "--no-sandbox", "--disable-dev-shm-usage"]
        command += [f"--user-data-dir={place}/profile", "--no-pdf-header-footer", f"--print-to-pdf={printed}"]
        try:
            done = subprocess.run([*command, source.resolve().as_uri()], capture_output=True, timeout=PATIENCE)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EngineError(f"{program} could not print {source} ({error}); print the HTML file by hand") from error
        if not printed.exists():
            raise StoreError(f"{program} printed nothing of {source} (exit code {done.returncode}); print it by hand")
        write_atomically(target, printed.read_bytes())

"""`docker/check` on a folder that stands for an image: what it calls broken, and what it lets pass."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LDD = """#!/bin/sh
case $(basename "$1") in
driver.so) echo "\tlibcuda.so.1 => not found" ;;
user.so) echo "\tlibtorch.so => not found" ;;
nvshmem_transport_ucx.so.3) echo "\tlibucp.so.0 => not found" ;;
broken.so) echo "\tlibnowhere.so.2 => not found" ;;
esac
"""


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """Holds a Python whose packages lack what an image may lack, and code that can be imported."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "python"], check=True)
    (site,) = (tmp_path / "python/lib").glob("python3*/site-packages")
    for name in ("driver.so", "user.so", "libtorch.so", "nvshmem_transport_ucx.so.3"):
        (site / name).write_bytes(b"\x7fELF")
    (site / "script.so").write_text("GROUP ( libc.so.6 )")
    for name, text in {
        "flowfleet/__init__.py": "",
        "flowfleet/plots.py": "import a_library_that_is_not_here",
        "flowfleet/old.py": "raise ImportError('flowfleet.old was removed: import flowfleet.new')",
        "services/__init__.py": "",
        "services/fine.py": "import flowfleet",
        "services/__main__.py": "raise SystemExit",
    }.items():
        (tmp_path / "app" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "app" / name).write_text(text)
    (tmp_path / "bin").mkdir()
    for name, script in {
        "ldd": LDD,
        "buildah": f'#!/bin/sh\n[ "$1" = run ] || {{ echo container; exit 0; }}\nexec {tmp_path}/python/bin/python -\n',
    }.items():
        (tmp_path / "bin" / name).write_text(script)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def check(image: Path) -> subprocess.CompletedProcess[str]:
    script = (ROOT / "docker/check").read_text()
    for folder in ("/usr/local/lib", "/usr/lib", "/app"):
        script = script.replace(f'"{folder}', f'"{image}{folder}')
    environment = {**os.environ, "PATH": f"{image}/bin:{os.environ['PATH']}"}
    return subprocess.run(["bash", "-c", script, "check", "an-image"], env=environment, capture_output=True, text=True)


def test_an_image_that_lacks_only_what_it_may_lack_passes(image: Path) -> None:
    done = check(image)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert lines[0] == "an-image:"
    assert lines[1].endswith("nvshmem_transport_ucx.so.3: libucp.so.0 not found (optional)")
    assert lines[2] == "5 shared libraries, 0 of which lack another one"
    assert lines[3] == "without a_library_that_is_not_here: flowfleet.plots"
    assert lines[4].startswith("1 of 2 modules imported")


def test_a_library_that_lacks_another_fails(image: Path) -> None:
    (image / "usr/lib").mkdir(parents=True)
    (image / "usr/lib/broken.so").write_bytes(b"\x7fELF")
    done = check(image)
    assert done.returncode == 1
    assert "broken.so: libnowhere.so.2 not found\n" in done.stdout


def test_a_module_that_cannot_be_imported_fails(image: Path) -> None:
    (image / "app/services/bad.py").write_text("import flowfleet.nothing")
    done = check(image)
    assert done.returncode == 1
    assert "services.bad: ModuleNotFoundError: No module named 'flowfleet.nothing'" in done.stdout

"""Make pip see what an interrupted install left half done: run by `make` with the Python of .venv.

A package is half done when its list of files is missing or names a file that is not there. Its metadata folder is
removed, so that the next `pip install` takes the package as absent and installs it whole.
"""

from __future__ import annotations

import shutil
import sys
from importlib import metadata
from pathlib import Path


def half_done(folder: Path) -> list[Path]:
    """Metadata folders in `folder` (a site-packages) of packages that are not whole."""
    found = []
    for info in sorted(folder.glob("*.dist-info")):
        files = metadata.PathDistribution(info).files if (info / "RECORD").is_file() else None
        # compiled files may be cleaned away by anyone
        if not files or not all(Path(str(file.locate())).exists() for file in files if file.suffix != ".pyc"):
            found.append(info)
    return found


def mend(folder: Path) -> list[str]:
    """Names of the packages in `folder` whose metadata was removed."""
    broken = half_done(folder)
    for info in broken:
        shutil.rmtree(info)
    for moved in folder.glob("~*"):  # where pip keeps files aside during an upgrade
        shutil.rmtree(moved) if moved.is_dir() else moved.unlink()
    return [info.name.removesuffix(".dist-info") for info in broken]


if __name__ == "__main__":
    import sysconfig

    names = mend(Path(sys.argv[1] if len(sys.argv) > 1 else sysconfig.get_paths()["purelib"]))
    print(f"== half-installed packages to install again: {', '.join(names) or 'none'}")

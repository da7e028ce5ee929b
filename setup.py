"""Build of the optional extension ``rvdcomm._C``; everything else is in pyproject.toml.

``RVDCOMM_CUDA=0|1|auto`` determines whether the CUDA engine is built: never, always, or (auto, the
default) if nvcc is found. With ``RVDCOMM_NATIVE=0``, no extension is built; rvdcomm then runs on
torch and numpy, slower but with the same results.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
COMPILERS = (os.environ.get("CXX"), "c++", "g++", "clang++")


class CMakeBuild(build_ext):
    """The build step, which builds every extension with the CMakeLists.txt beside this file."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build = Path(self.build_temp).resolve() / ext.name
        build.mkdir(parents=True, exist_ok=True)
        configure = [
            "cmake",
            "-S",
            str(ROOT),
            "-B",
            str(build),
            "-G",
            "Ninja",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target.parent}",
            f"-DRVDCOMM_CUDA={os.environ.get('RVDCOMM_CUDA', 'auto')}",
        ]
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(build), "--target", "_C"], check=True)


def extensions() -> list[Extension]:
    """The extension; none if ``RVDCOMM_NATIVE=0`` or if there is no C++ compiler."""
    if os.environ.get("RVDCOMM_NATIVE") == "0":
        return []
    if not any(shutil.which(name) for name in COMPILERS if name):
        print("rvdcomm: no C++ compiler was found, so the extension is left out.", file=sys.stderr)
        return []
    return [Extension("rvdcomm._C", sources=[])]


setup(ext_modules=extensions(), cmdclass={"build_ext": CMakeBuild})

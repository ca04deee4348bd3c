"""Maps the folders beside zoo/ to its subpackages: components/ is imported as zoo.components. All else is in pyproject.toml."""

from setuptools import find_namespace_packages, setup

FOLDERS = {"zoo": "zoo"} | {f"zoo.{folder}": folder for folder in ("components", "quantize", "eval", "recipes")}


def subpackages(package: str, folder: str) -> list[str]:
    """Every folder below, folders of data (named models) too."""
    return [f"{package}.{name}" for name in find_namespace_packages(folder, exclude=["*__pycache__*"])]


setup(
    package_dir=FOLDERS,
    packages=[name for package, folder in FOLDERS.items() for name in (package, *subpackages(package, folder))],
)

"""Data sets that need a package of the extra `data` say so when it is missing."""

from __future__ import annotations

import sys

import pytest

from echelon.errors import DataError
from echelon.zoo.dataset import DATASETS


@pytest.mark.parametrize(
    ("data", "module", "package"),
    [
        ("digits", "sklearn", "scikit-learn"),
        ("generated", "sklearn", "scikit-learn"),
        ("image-folder(path=.)", "PIL", "pillow"),
        ("cifar10", "PIL", "pillow"),
    ],
)
def test_data_set_without_its_package_names_the_package_and_the_command(
    monkeypatch, data_home, data, module, package
):
    (data_home / "cifar10.zip").touch()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError) as caught:
        DATASETS.build(data).load()
    name = data.partition("(")[0]
    assert caught.value.message == f"data set {name} needs the package {package}, which is not installed"
    assert caught.value.where == f"data {name}"
    assert f"pip install {package}" in caught.value.fix

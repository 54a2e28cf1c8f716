import pytest

from echelon.errors import LaunchError
from echelon.start.module import check_module


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "pack" / "inner.py").touch()
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "__init__.py").write_text("__path__.append('elsewhere')")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "name", ["pack", "pack.inner", "strange.anything", "echelon.train.job", "json.tool"]
)
def test_modules_that_are_there_or_may_be_pass_without_being_imported(package, name):
    check_module(name)


@pytest.mark.parametrize(
    "name", ["no.such.module", "nosuch", "pack.other", "pack.inner.deeper", "a b", "a..b"]
)
def test_modules_that_are_not_there_are_refused(package, name):
    with pytest.raises(LaunchError, match="there is no module"):
        check_module(name)

"""Spark in a session that each run creates, on this machine."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from engines import MARK, Engine

# Java starts in less time, and compiles less: Spark has little to do here.
QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


class SparkEngine(Engine):
    """As many slots as workers; Java and Spark's processes end with the run."""

    name = "spark"

    @classmethod
    def missing(cls) -> str:
        if importlib.util.find_spec("pyspark") is None:
            return 'pyspark is not installed: pip install "echelon[spark]"'
        home = os.environ.get("JAVA_HOME")
        java = shutil.which(Path(home) / "bin" / "java" if home else "java")
        return "" if java else "there is no Java, which Spark needs: install Java 17"

    @property
    def env(self) -> dict[str, str]:
        return {MARK: str(self.folder), "JDK_JAVA_OPTIONS": QUICK_JAVA}

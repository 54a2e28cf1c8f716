"""One file per data set. A file is found by being here; see `echelon.zoo.dataset` for the contract."""

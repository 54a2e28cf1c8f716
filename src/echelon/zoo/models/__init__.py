"""One file per model. A file is found by being here; see `echelon.zoo.model` for the contract."""

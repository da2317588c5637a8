"""Functions of a whole batch, method="batch": the pass, and the checks that no sample reaches another's loss."""

"""What needs a GPU to be measured, or a GPU's compiler to be checked."""

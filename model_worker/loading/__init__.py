"""Loading of weights from files into layers."""

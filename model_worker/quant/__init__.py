"""Storage formats of linear layers' weights. Knows no layer and no file."""

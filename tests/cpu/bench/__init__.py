"""The load generator against a scripted server. A new backend or data set gets a file here."""

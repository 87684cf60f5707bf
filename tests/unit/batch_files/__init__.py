"""The batch command without a server: lines, the output file, the pace."""

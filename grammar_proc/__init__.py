"""The grammar process: compiles guides, follows guided output, and says what may come next."""

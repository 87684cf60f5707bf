"""The grammar process: compiles guides, follows the output of guided sequences, and makes the masks of the
token ids that may follow.
"""

"""The settings of a launch. A setting is declared once, in `table`: its type and bounds check it, its
description is its help text. `config.RuntimeConfig` is the table and what follows from it.
"""

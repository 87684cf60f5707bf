"""JSON of what an answer has much of, made piece by piece as the answer is written."""

"""The SDK over real sockets, without a model where it does not matter. Share `demo_launch` where you can."""

"""Measurements that need a GPU, and checks that need its compiler."""

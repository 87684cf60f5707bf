"""Tests of Carousel. README.md says what each folder holds, what they stand on, and how to add one."""

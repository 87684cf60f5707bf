// The linear layer on CPUs that multiply no pairs of bf16, and of float32 on any.
#pragma once

#include "linear_call.h"

namespace carousel {

void multiply_widened(const LinearCall& call);

}  // namespace carousel

#include "check.h"

int main() {
  check_halves();
  check_linear();
  check_int8();
  check_elementwise();
  check_experts();
  check_rows();
  check_attention();
  check_sampling();
  check_logits();
  check_ranks();
  std::printf("%d checks passed, %d lanes\n", check::num_checks, carousel::kLanes);
}

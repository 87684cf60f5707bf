// float16 to float32 and back.
#include "check.h"

namespace {

using namespace carousel;

double value_of(int bits) {
  const int power = bits >> 10 & 31, steps = bits & 1023;
  const double size = power ? std::ldexp(1024 + steps, power - 25) : std::ldexp(steps, -24);
  return bits & 0x8000 ? -size : size;
}

uint16_t rounded(float value) {
  const float values[kLanes] = {value};
  fp16 halves[kLanes];
  store(halves, load(values));
  return halves->bits;
}

void check_number(int bits) {
  const fp16 half{(uint16_t)bits};
  const float wide = to_float(half);
  const int back = rounded(wide);
  if ((bits & 0x7c00) != 0x7c00) {
    check::equal("float16, widened", std::vector<double>{wide}, std::vector<double>{value_of(bits)});
  } else if (bits & 1023) {
    check::equal("float16, NaN", std::vector<bool>{wide != wide, (back & 0x7fff) > 0x7c00},
                 std::vector<bool>{true, true});
    return;
  } else {
    check::equal("float16, infinity", std::vector<float>{wide}, std::vector<float>{bits & 0x8000 ? -INFINITY : INFINITY});
  }
  check::equal("float16, as it was", std::vector<int>{back}, std::vector<int>{bits});
}

void check_rounding(float value) {
  const int expected = check::narrow<fp16>(value).bits;
  check::equal("rounded to float16", std::vector<int>{rounded(value)}, std::vector<int>{expected});
}

}  // namespace

void check_halves() {
  for (int bits = 0; bits < 1 << 16; ++bits) check_number(bits);
  for (int bits = 0; bits < 0x7bff; ++bits) {  // between two neighbours: the middle, and beside it
    const float middle = (float)((value_of(bits) + value_of(bits + 1)) / 2);
    for (float value : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 1e9f)}) {
      check_rounding(value);
      check_rounding(-value);
    }
  }
  for (float value : {65504.0f, 65519.0f, 65520.0f, 1e30f, 1e-30f, 1e-40f}) check_rounding(value);
}

// Rotation of the queries or keys of few tokens by their positions (Su et al. 2021, section 3.4.2). A step of decoding
// has one token, for which a dozen operators of torch would take longer than attention.
#pragma once
#include "block.h"
#include "rotation.h"

namespace headwise::HEADWISE_ISA {

template <class Element>
inline void rotate_as(const Rotation& r) {
  constexpr double kTau = 6.283185307179586;
  const Element* x = static_cast<const Element*>(r.x);
  Element* y = static_cast<Element*>(r.y);
  const int64_t pairs = r.rotated / 2;
  for (int64_t b = 0; b < r.batch; ++b)
    for (int64_t t = 0; t < r.tokens; ++t) {
      const int64_t position = r.positions[b * r.position_stride + t];
      for (int64_t pair = 0; pair < pairs; ++pair) {
        // Full turns are removed before rounding: a float angle is off by thousandths at position 100,000.
        const double turns = double(position) * r.turns[pair];
        const float angle = float((turns - __builtin_nearbyint(turns)) * kTau);
        const float cos = __builtin_cosf(angle) * float(r.factor), sin = __builtin_sinf(angle) * float(r.factor);
        const int64_t first = r.interleaved ? 2 * pair : pair, second = r.interleaved ? first + 1 : pair + pairs;
        for (int64_t h = 0; h < r.heads; ++h) {
          const Element* from = row_of(x, r.x_strides, b, h, t);
          Element* to = row_of(y, r.y_strides, b, h, t);
          const float one = widen(from[first]), other = widen(from[second]);
          narrow(one * cos - other * sin, to + first);
          narrow(other * cos + one * sin, to + second);
        }
      }
      for (int64_t h = 0; h < r.heads; ++h) {
        const Element* from = row_of(x, r.x_strides, b, h, t);
        Element* to = row_of(y, r.y_strides, b, h, t);
        for (int64_t d = r.rotated; d < r.width; ++d) to[d] = from[d];
      }
    }
}

inline void rotate(const Rotation& r) {
  if (r.bfloat16) rotate_as<uint16_t>(r);
  else rotate_as<float>(r);
}

}  // namespace headwise::HEADWISE_ISA

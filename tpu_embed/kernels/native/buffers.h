// What the custom calls share: checks of their buffers, and errors.
#ifndef TPU_EMBED_BUFFERS_H_
#define TPU_EMBED_BUFFERS_H_

#include <cstdint>
#include <exception>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace tpu_embed {

namespace ffi = xla::ffi;

// Returns the error of a call whose operands do not fit together.
inline ffi::Error refuse(const std::string& what) {
  return ffi::Error::InvalidArgument("tpu_embed: " + what);
}

// Returns run(), or the error it threw (memory that cannot be had): none may cross into XLA.
template <typename Run>
ffi::Error guarded(const Run& run) {
  try {
    return run();
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("tpu_embed: ") + error.what());
  }
}

// Returns the first dimension of a buffer.
inline int64_t length(const ffi::AnyBuffer& buffer) { return buffer.dimensions()[0]; }

// Returns the bytes of one row of `[rows, ...]`.
inline int64_t row_bytes(const ffi::AnyBuffer& buffer) {
  const auto shape = buffer.dimensions();
  int64_t numbers = 1;
  for (size_t axis = 1; axis < shape.size(); ++axis) numbers *= shape[axis];
  return numbers * static_cast<int64_t>(ffi::ByteWidth(buffer.element_type()));
}

// Returns an operand's numbers, or null for one of no elements: an optional one that is absent.
template <typename T>
const T* optional(const ffi::AnyBuffer& buffer) {
  return buffer.element_count() == 0 ? nullptr : static_cast<const T*>(buffer.untyped_data());
}

// Returns whether an optional operand is absent or has `length` elements.
inline bool optional_of_length(const ffi::AnyBuffer& buffer, int64_t length) {
  const int64_t count = static_cast<int64_t>(buffer.element_count());
  return count == 0 || count == length;
}

template <typename T>
T* data(const ffi::AnyBuffer& buffer) {
  return static_cast<T*>(buffer.untyped_data());
}

// Calls run with a null pointer of the type of row numbers, int32 or int64.
template <typename Run>
ffi::Error with_row_type(const ffi::AnyBuffer& rows, const Run& run) {
  switch (rows.element_type()) {
    case ffi::DataType::S32:
      return guarded([&] { return run(static_cast<int32_t*>(nullptr)); });
    case ffi::DataType::S64:
      return guarded([&] { return run(static_cast<int64_t*>(nullptr)); });
    default:
      return refuse("row numbers must be int32 or int64");
  }
}

}  // namespace tpu_embed

#endif  // TPU_EMBED_BUFFERS_H_

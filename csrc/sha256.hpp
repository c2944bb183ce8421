// SHA-256 (FIPS 180-4) of short messages, for block keys: one call, no state between calls.
#pragma once
#include <cstddef>
#include <cstdint>

namespace pagedkv {

// Writes the 32 bytes of the digest of message[0 .. size) to digest.
void sha256(const uint8_t* message, size_t size, uint8_t* digest);

// The same by the portable rounds, whatever the processor has: what the fast ones are tested against.
void sha256_portable(const uint8_t* message, size_t size, uint8_t* digest);

// Whether sha256() uses the processor's own SHA instructions.
bool sha256_in_hardware();

}  // namespace pagedkv

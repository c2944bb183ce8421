// Stand-alone checks of the kernels, without Python: under sanitizers, and cross-compiled under an emulator.
#pragma once

// Each returns the number of failures and prints what it did, for the instruction set in use.
int check_attention();
int check_product();

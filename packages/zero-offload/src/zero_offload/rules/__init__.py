"""Update rules: how an optimizer's step is computed by a host kernel, without owning memory."""

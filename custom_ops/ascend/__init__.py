"""The op on Huawei Ascend: Ascend C kernel, operator project, host emulator and torch binding. See README.md here."""
